"""Parts of a measurement that must end in time: each is recorded as it ends, and none can spoil the others."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.out_of_memory import out_of_memory

Part = Callable[[], dict[str, Any]]
Record = Callable[[str, dict[str, Any]], None]


class OutOfTime(Exception):
    """The clock ran out in the middle of a part."""


def run_parts(
    parts: dict[str, Part],
    record: Record,
    seconds: float,
    clean_up: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs the parts in order until `seconds` have passed; `record` is told each part's figures, or why it has none.

    A part that runs out of memory is recorded, and the next one begins. One that is running when time is up is stopped.
    """
    started = clock()
    for name, part in parts.items():
        left = seconds - (clock() - started)
        if left <= 0:
            record(name, {"skipped": "no time was left"})
            continue
        begun = clock()
        try:
            with _alarm(left):
                figures = part()
        except (RuntimeError, MemoryError) as error:
            if (said := out_of_memory(error)) is None:
                raise
            figures = {"failed": "out of memory", "said": said}
        except OutOfTime:
            figures = {"failed": "out of time"}
        record(name, figures | {"wall_seconds": clock() - begun})
        clean_up()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
