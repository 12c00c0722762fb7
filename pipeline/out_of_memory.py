"""Where memory runs out in a pass over rows, the pass is done again in pieces of half the size.

Objectives give sums, and sampling noise belongs to its row: the size of a piece changes memory, speed and rounding, and nothing
else. What did not fit once is not tried again. Memory belongs to the process, so what fits into it does too; a checkpoint
keeps it, and the run is marked.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from pipeline import ranks
from pipeline.randomness import RandomStates

T = TypeVar("T")
Report = Callable[[str, int], None]
"""A runtime parameter's name, and the size that it is held to from now on."""

WORDS = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")


def out_of_memory(error: BaseException) -> str | None:
    """What an error says of memory and where it came up; None for any other error.

    torch raises `OutOfMemoryError` on a GPU and a plain RuntimeError on a CPU, numpy and Python a MemoryError; torch's CPU
    error is known by its words alone.
    """
    words = str(error).strip().partition("\n")[0]
    if not isinstance(error, MemoryError) and not any(word in words.lower() for word in WORDS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).parent.name in ("pipeline", "stages")]
    place = f" in {Path(ours[-1].filename).name}, {ours[-1].name}" if ours else ""
    return f"{words[:200] or 'MemoryError'}{place}"


def _to_nobody(_name: str, _limit: int) -> None:
    """Nobody is told."""


class PieceSize:
    """How large the pieces of one kind of pass may be; the same in all processes.

    name: the runtime parameter that asks for a size.
    limit: half of the smallest size that did not fit; None while all did.
    report: told of each limit.
    """

    def __init__(self, name: str):
        self.name = name
        self.limit: int | None = None
        self.report: Report = _to_nobody

    def fit(self, size: int, work: Callable[[int], T], undo: Callable[[], None] = lambda: None) -> T:
        """`work(size)`; where memory runs out, from its beginning with half of that, and half again, down to 1.

        Generators are put back before it begins again: the result is that of a run which had the smaller size here.

        Args:
            undo: throws away what work that was broken off has left, such as gradients half summed up.

        Raises:
            RuntimeError, MemoryError: pieces of size 1 do not fit either, or processes go through a pass in step.
        """
        random = RandomStates()
        before = random.state_dict()
        while True:
            allowed = size if self.limit is None else min(size, self.limit)
            try:
                return work(allowed)
            except (RuntimeError, MemoryError) as error:
                if allowed == 1 or ranks.in_step() or out_of_memory(error) is None:
                    raise
                if not isinstance(error, ranks.OutOfMemoryElsewhere):
                    ranks.give_up()
            # beyond the except clause: the error's traceback holds the tensors of the pass that was broken off
            undo()
            random.load_state_dict(before)
            torch.cuda.empty_cache()
            self.hold_to(allowed // 2)

    def hold_to(self, limit: int) -> None:
        """No piece is larger from now on; says so."""
        self.limit = limit
        self.report(self.name, limit)


MICROBATCH = PieceSize("microbatch_tokens")
ROLLOUT_CHUNK = PieceSize("rollout_chunk")
SIZES = (MICROBATCH, ROLLOUT_CHUNK)


@contextlib.contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Sizes start unlimited, and `report` is told of each limit; both only until the end of the block."""
    for size in SIZES:
        size.limit, size.report = None, report
    try:
        yield
    finally:
        for size in SIZES:
            size.limit, size.report = None, _to_nobody


def limits() -> dict[str, str]:
    """Runtime parameters that are not what params.yaml says, for a checkpoint's circumstances."""
    return {f"runtime.{size.name}": f"at most {size.limit}, as memory ran out" for size in SIZES if size.limit}


class MemoryLimits:
    """What has proved too large, as a part of a training state."""

    def state_dict(self) -> dict[str, int]:
        """Name -> limit, where there is one."""
        return {size.name: size.limit for size in SIZES if size.limit}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Holds to what was found then, or less."""
        for size in SIZES:
            if size.name in state and (size.limit is None or size.limit > state[size.name]):
                size.hold_to(state[size.name])
