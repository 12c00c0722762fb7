"""What a person sees of a loop: a bar with the numbers that matter on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline import ranks

if isinstance(sys.stdout, TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a character that a terminal lacks is a question mark, not a traceback
console = Console(highlight=False, soft_wrap=True, quiet=not ranks.is_main())
SLOW_SECONDS = 20  # after this long without a line, the next step brings one


def tell(notes: Iterable[str]) -> None:
    """Prints what a person should know, and can do without."""
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")


class ProgressBar:
    """A bar over `total` steps. Where there is no terminal, a line every `line_every` steps, and where steps are slow at each."""

    def __init__(self, title: str, total: int, line_every: int):
        self.title = title
        self.total = total
        self.line_every = line_every
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._last_line = time.monotonic()
        self._task = self._bar.add_task(title, total=total, numbers="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, step: int, **numbers: float) -> None:
        """Step `step`, counted from 0, is done."""
        text = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        self._bar.update(self._task, completed=step + 1, numbers=text)
        due = (step + 1) % self.line_every == 0 or step + 1 == self.total
        due = due or time.monotonic() - self._last_line > SLOW_SECONDS
        if due and not console.is_terminal:
            self._last_line = time.monotonic()
            console.print(f"{self.title} {step + 1}/{self.total}  {text}", markup=False)
