"""What a person, or a program, sees of a stage while it runs: `runtime.progress` says how.

auto    bars on a terminal, quiet where the variable CI is set, lines elsewhere
bars    a bar with the time left and the numbers that matter, and a line of them every so many steps
lines   those lines alone, with the time left
json    one JSON object per line and nothing else: {"event": "step", "of": 9, "step": 3, …}; {"event": "text", …} is what people read
quiet   the first and the last lines of a stage, and what is wrong
"""

import io
import json
import os
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline import processes

Mode = Literal["auto", "bars", "lines", "json", "quiet"]
if isinstance(sys.stdout, TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # a character that a terminal lacks is a question mark, not a traceback
console = Console(highlight=False, soft_wrap=True, quiet=not processes.is_main())
INFINITE = (float("inf"), float("-inf"))
SLOW_SECONDS = 20  # after this long without a line, the next step brings one


class _TextEvents(io.TextIOBase):
    """Where the console writes in mode json: each line of text becomes an event."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if plain := Text.from_ansi(line).plain.strip():
                emit("text", text=plain)
        return len(text)


class _Shown:
    """How this process shows itself; there is one console, and so one of these.

    bar: the one that is on the terminal.
    """

    mode: Mode = "auto"
    bar: "ProgressBar | None" = None


def print_whole(*tables: Table) -> None:
    """Tables of figures, as wide as they are: on a narrow terminal lines break, but no figure is cut short."""
    unbounded = console.options.update(max_width=10**4)
    for table in tables:
        table.width = Measurement.get(console, unbounded, table).maximum
        console.print(table)


def show_as(mode: Mode) -> None:
    """From now on in this mode."""
    _Shown.mode = mode
    if mode == "json":
        console.file = _TextEvents()
    elif isinstance(console.file, _TextEvents):
        console.file = None  # standard output again


def shown_as() -> Mode:
    """The mode, `auto` resolved."""
    if _Shown.mode != "auto":
        return _Shown.mode
    if os.environ.get("CI"):
        return "quiet"
    return "bars" if console.is_terminal else "lines"


def emit(event: str, **fields: Any) -> None:
    """One JSON line, flushed: who reads it may wait for it. Numbers that JSON does not have become null."""
    line = {"event": event} | {
        name: None if value != value or value in INFINITE else value for name, value in fields.items()
    }
    sys.stdout.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def announce(event: str, text: str, **fields: Any) -> None:
    """Something that happens once in a stage: the text for people, the fields for programs."""
    if shown_as() == "json":
        emit(event, **fields)
    else:
        console.print(text, markup=False)


def tell(notes: Iterable[str]) -> None:
    """Prints what a person should know, and can do without."""
    for note in notes:
        console.print(f"note: {note}", markup=False, style="yellow")


def doing(what: str) -> None:
    """Puts a word beside the bar, if there is one: what its present step is at. Long steps would else look like a hang."""
    if _Shown.bar is not None:
        _Shown.bar.say(what)


def duration(seconds: float) -> str:
    """For people: `45 s`, `9 min 39 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class ProgressBar:
    """A loop of `total` steps, shown as `runtime.progress` says.

    line_every: steps between two lines of numbers; where steps are slow, there is one at each.
    """

    def __init__(self, title: str, total: int, line_every: int):
        self.title = title
        self.total = total
        self.line_every = line_every
        self.mode = shown_as()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[doing]}"),
            console=console,
            disable=self.mode != "bars",
        )
        self._task = self._bar.add_task(title, total=total, numbers="", doing="")
        self._began = self._last_line = time.monotonic()
        self._first: int | None = None  # a loop that goes on where another process was does not begin at 0

    def __enter__(self) -> Self:
        self._bar.start()
        _Shown.bar = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _Shown.bar = None
        self._bar.stop()

    def say(self, what: str) -> None:
        """What the present step is at."""
        self._bar.update(self._task, doing=what)

    def advance(self, step: int, **numbers: float) -> None:
        """Step `step`, counted from 0, is done."""
        done = step + 1
        if self._first is None:
            self._first = step
        left = self.seconds_left(done, time.monotonic() - self._began)
        if self.mode == "json":
            emit("step", loop=self.title, step=done, of=self.total, seconds_left=round(left, 1), **numbers)
        text = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        self._bar.update(self._task, completed=done, numbers=text, doing="")
        due = done % self.line_every == 0 or done == self.total
        due = due or time.monotonic() - self._last_line > SLOW_SECONDS
        if due and self.mode in ("bars", "lines"):
            self._last_line = time.monotonic()
            remaining = f"  {duration(left)} left" if done < self.total else ""
            console.print(f"{self.title} {done}/{self.total}  {text}{remaining}", markup=False)

    def seconds_left(self, done: int, elapsed: float) -> float:
        """At the mean pace of the steps that this process has taken."""
        taken = done - (self._first or 0)
        return elapsed / taken * (self.total - done)
