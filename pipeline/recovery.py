"""How a loop goes on where another process was stopped: what it holds, when that is written, and how it is put back.

A loop says `reached` wherever nothing is half done: after each optimizer step, and in RL after each rollout and iteration. There
all that changes is taken down, and now and then written. Whatever then ends the process, the rest is replayed to the same
bits, as every random number is a function of seed and place or of the generators' states, which are held too.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline import interruption, processes, ranks
from pipeline.checkpoint import (
    Checkpoint,
    CheckpointError,
    State,
    numbered,
    read_checkpoint,
    remove_partial,
    write_checkpoint,
)
from pipeline.out_of_memory import MemoryLimits, limits
from pipeline.progress import console
from pipeline.randomness import RandomStates, derive_seed
from pipeline.stage import Stage
from pipeline.update import Optimizer

PROCESSES = "the number of processes"


class Resumable(Protocol):
    """A part of a training state."""

    def state_dict(self) -> dict[str, Any]:
        """Dicts and lists of tensors and of what JSON can hold. What nothing but an optimizer step changes may be the thing itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""


class OfEach:
    """A part that is another in each process; the checkpoint has all of them."""

    def __init__(self, part: Resumable):
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        """In the order of ranks."""
        return {"ranks": ranks.exchange(self.part.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """This process's own."""
        self.part.load_state_dict(state["ranks"][processes.rank()])


class Recovery:
    """The checkpoints of one training.

    folder: of no other training, whatever may differ.
    every_steps, every_seconds: a checkpoint is due at the first place where either has passed since the last one.
    made_under: told to a person where it differs from that of the checkpoint; see `Checkpoint`.
    flush: called before a checkpoint is written, so that what was reported until then has arrived.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        every_steps: int,
        every_seconds: float,
        made_under: dict[str, str],
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name = name
        self.folder = folder
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.made_under = made_under
        self.flush = flush
        self.clock = clock
        self._parts: dict[str, Resumable] = {}
        self._optimizer: Optimizer
        self._number = 0  # of places reached
        self._last: Checkpoint | None = None  # taken down, perhaps not written
        self._saved: Checkpoint | None = None
        self._saved_at = clock()

    def hold(self, **parts: Resumable) -> "Recovery":
        """More to be kept; itself."""
        self._parts |= parts
        return self

    def resume(self, optimizer: Optimizer, **parts: Resumable) -> int:
        """Puts all parts back to the newest checkpoint that is sound; how many places lie before it, 0 without one.

        From here on a signal waits for a place where nothing is lost. A damaged checkpoint is named and left out: with
        the one before, or from the beginning, the same result takes longer.

        Raises:
            CheckpointError: it was made by another number of processes.
        """
        self._optimizer = optimizer
        self.hold(optimizer=optimizer, **parts)
        interruption.wait_for_polls()
        if processes.is_main():
            remove_partial(self.folder)
        found = numbered(self.folder)
        checkpoint = self._newest_sound(found)
        if checkpoint is None:
            if found:
                self._say("no checkpoint is sound: it starts from the beginning.")
            return 0
        made_by = int(checkpoint.made_under.get(PROCESSES, "1"))
        if made_by != processes.count():
            raise CheckpointError(
                f"The checkpoint after {checkpoint.place} in {self.folder} was made by {made_by} process(es) and there are "
                f"{processes.count()} now, which draw other random numbers; set runtime.launch and runtime.processes as they were, "
                "or remove that folder to start anew."
            )
        for name, part in self._parts.items():
            part.load_state_dict(checkpoint.state[name])
        self._last = self._saved = checkpoint
        self._number = checkpoint.number
        self._say(f"goes on after {checkpoint.place}, from {self.folder}.")
        now = self._circumstances
        for what, then in checkpoint.made_under.items():
            if then != now.get(what):
                self._say(f"{what} was {then} until there and is {now.get(what)} now: the last bits may differ.")
        return checkpoint.number

    def reached(self, place: str) -> None:
        """Nothing is half done here: takes down all parts, and writes them where a checkpoint is due."""
        self._number += 1
        due = ranks.of_main(self._is_due)  # the processes' clocks differ
        if due or not ranks.in_step():  # in step, moments lie with all processes: collecting them takes time
            self._last = Checkpoint(self._number, place, self._circumstances, self._state())
        if due:
            self.save()

    def save(self) -> str | None:
        """Writes the place reached last, unless it is written; where that is, in words, or None where it is the start."""
        if self._last is not None and self._last is not self._saved and self._unmoved():
            self.flush()
            if processes.is_main():
                write_checkpoint(self.folder, self._last)
            self._saved, self._saved_at = self._last, self.clock()
        return self._saved and f"after {self._saved.place}, which is kept in {self.folder}"

    def _is_due(self) -> bool:
        steps = self._number - (self._saved.number if self._saved else 0)
        return steps >= self.every_steps or self.clock() - self._saved_at >= self.every_seconds

    def _unmoved(self) -> bool:
        """Whether no optimizer step has begun since: one that an error has broken off leaves weights half changed."""
        return self._optimizer.steps_taken == self._last.state["optimizer"]["steps_taken"]

    @property
    def _circumstances(self) -> dict[str, str]:
        return self.made_under | limits() | ({PROCESSES: str(processes.count())} if processes.count() > 1 else {})

    def _state(self) -> State:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _newest_sound(self, found: list[Path]) -> Checkpoint | None:
        for place in found:
            try:
                return read_checkpoint(place, self._parts)
            except CheckpointError as error:
                self._say(f"{error} It is not used.")
        return None

    def _say(self, sentence: str) -> None:
        console.print(f"{self.name}: {sentence}", markup=False, style="yellow")


class NoRecovery:
    """For a loop that nobody will want to go on with."""

    def resume(self, **_: Resumable) -> int:
        """The beginning."""
        return 0

    def reached(self, _: str) -> None:
        """Forgotten."""


NO_RECOVERY = NoRecovery()


def recovery_of(stage: Stage) -> Recovery:
    """A stage's own, which the stage writes to when it is stopped."""
    runtime = stage.runtime
    recovery = Recovery(
        stage.name,
        stage.folder,
        runtime.checkpoint_steps,
        60 * runtime.checkpoint_minutes,
        stage.circumstances,
        stage.tracker.flush,
    )
    stage.on_stop = recovery.save
    if processes.count() > 1:  # dropout is not to be the same in all processes
        torch.manual_seed(derive_seed(stage.seed, "rank", processes.rank()))
    return recovery.hold(random=OfEach(RandomStates()), stage=stage, memory=MemoryLimits())
