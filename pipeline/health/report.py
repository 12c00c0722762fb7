"""Where findings are shown: in the log as they appear, in MLflow as tags and a table, and on demand as a table."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.errors import TrainingError
from pipeline.health.curve import Row
from pipeline.health.findings import Finding
from pipeline.health.memory import OUT_OF_MEMORY
from pipeline.health.rules import find_in_result, step_watcher
from pipeline.out_of_memory import out_of_memory
from pipeline.progress import console
from pipeline.tracking.tracker import Tracker

WIDTH = 110
TAG = "health"
CLEAN = "nothing found"


class HealthLog:
    """Says a stage's findings as they appear.

    In MLflow: a tag `health.RULE` for each at once, so that it is there when the stage is killed, and at the end a tag
    `health` to filter runs by and a table of all.
    """

    def __init__(self, stage: str, tracker: Tracker, params: Mapping[str, str]):
        self.stage = stage
        self.tracker = tracker
        self.params = params
        self.found: list[Finding] = []
        self._watcher = step_watcher(stage, params)

    def replay(self, rows: Sequence[Row]) -> None:
        """Rows of an earlier process, which has said what it found in them."""
        self.found += [finding for row in rows for finding in self._watcher.step(row)]

    def step(self, row: Row) -> None:
        """A row of the stage's curve."""
        self._say(self._watcher.step(row))

    def result(self, metrics: Row) -> None:
        """What the stage writes at its end."""
        self._say(find_in_result(self.stage, metrics, self._steps, self.params))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the stage's work: sums up at its end, whichever end, and explains where memory ran out.

        Raises:
            TrainingError: in the place of an error that memory ran out.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            seen = out_of_memory(error)
            if seen is None:
                raise
            self._say([OUT_OF_MEMORY.finding(self.stage, self._steps, seen, self.params)])
            raise TrainingError("out of memory; what to lower is said above.") from error
        finally:
            self.tracker.log_table(TAG, [asdict(finding) for finding in self.found])
            if self._steps or self.found:
                names = dict.fromkeys(finding.rule for finding in self.found)
                self.tracker.set_tags({TAG: ", ".join(names) or CLEAN})

    @property
    def _steps(self) -> int:
        return len(self._watcher.curve)

    def _say(self, findings: list[Finding]) -> None:
        for finding in findings:
            console.print(block(self.stage, finding), markup=False, style="yellow")
        if findings:
            self.tracker.set_tags({f"{TAG}.{found.rule}": f"step {found.step}: {found.seen}" for found in findings})
        self.found += findings


def block(stage: str, finding: Finding) -> str:
    """A finding as lines for a log."""
    lines = [f"{stage}, step {finding.step}: {finding.rule}"]
    for label in ("seen", "cause", "change"):
        lines += textwrap.wrap(
            getattr(finding, label),
            WIDTH,
            initial_indent=f"  {label:<8}",
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def findings_table(found: Mapping[str, list[Finding]]) -> Table:
    """Findings by stage; narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("found", no_wrap=True)
    table.add_column("seen, likely cause, what to change")
    for stage, findings in found.items():
        for finding in findings:
            table.add_row(
                Text(f"{finding.rule}\n{stage}, step {finding.step}"),
                Text(f"{finding.seen}\n{finding.cause}\n{finding.change}"),
            )
    return table
