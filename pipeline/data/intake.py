"""One pass over all raw rows: what can be used, what cannot and why."""

from collections import Counter
from dataclasses import asdict, dataclass

from pipeline.data.readers import data_files, read_rows
from pipeline.data.records import BadRow, Pair, to_pair
from pipeline.errors import DataError
from pipeline.progress import console

SHOWN_REJECTS = 20


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used: where it stands, which field, and why."""

    file: str
    line: int
    field: str
    reason: str

    @property
    def kind(self) -> str:
        """What rejects are counted by."""
        return f"{self.field} {self.reason}"


@dataclass(frozen=True)
class Intake:
    """All usable pairs, all rejects, and how often each shape was met."""

    pairs: list[Pair]
    rejects: list[Reject]
    shapes: dict[str, int]

    @property
    def rows(self) -> int:
        """Rows read."""
        return len(self.pairs) + len(self.rejects)

    def rejects_by_kind(self) -> dict[str, int]:
        """How often each reason was met, the most frequent first."""
        return dict(Counter(reject.kind for reject in self.rejects).most_common())

    def reject_rows(self) -> list[dict[str, str | int]]:
        """The rejects as plain rows."""
        return [asdict(reject) for reject in self.rejects]


def read_all(path: str) -> Intake:
    """Every row under `path`, judged.

    Raises:
        DataError: a file is missing or cannot be read at all.
    """
    pairs: list[Pair] = []
    rejects: list[Reject] = []
    shapes: Counter[str] = Counter()
    for file in data_files(path):
        for row in read_rows(file):
            try:
                if row.fault is not None:
                    raise BadRow("row", row.fault)
                pair, shape = to_pair(row.content)
            except BadRow as bad:
                rejects.append(Reject(row.file, row.line, bad.field, bad.reason))
                continue
            pairs.append(pair)
            shapes[shape] += 1
    return Intake(pairs, rejects, dict(shapes))


def report_rejects(intake: Intake, path: str, max_bad_share: float) -> None:
    """Says which rows cannot be used.

    Raises:
        DataError: they are more than `max_bad_share` allows, or nothing is left.
    """
    for reject in intake.rejects[:SHOWN_REJECTS]:
        console.print(f"{reject.file}:{reject.line}: {reject.kind}", markup=False, style="yellow")
    if len(intake.rejects) > SHOWN_REJECTS:
        console.print(f"… and {len(intake.rejects) - SHOWN_REJECTS} more rows that cannot be used", markup=False)
    if not intake.pairs:
        raise DataError(f"data.pairs {path!r} has no row that can be used ({len(intake.rejects)} rejected).")
    share = len(intake.rejects) / intake.rows
    if share > max_bad_share:
        kind, times = next(iter(intake.rejects_by_kind().items()))
        raise DataError(
            f"{len(intake.rejects)} of {intake.rows} rows of {path} cannot be used ({share:.1%}; most often: {kind}, {times} times), "
            f"more than data.max_bad_share {max_bad_share:g}; mend the rows, or raise data.max_bad_share to go on without them."
        )
