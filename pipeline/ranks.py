"""This process among those that work on one stage; with one process everything here is trivial.

Every process holds the whole base, and the whole of each batch, rollout and experience. Divided are the passes over rows, which
cost all the time and memory: each process takes its share and gives what it found to all. What is then made of all rows (sums,
whitening, KL, metrics, decisions) is the same everywhere, without a second implementation that would work on a part of them.

Processes meet in `exchange`, in the same order everywhere. Weights are the same everywhere because gradients are summed, not
averaged: objectives give sums, which are divided by the number of terms of ALL rows (`Batch.num_terms`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import interruption
from pipeline.errors import PeerLostError
from pipeline.interruption import Interrupted
from pipeline.processes import count, is_main, rank

T = TypeVar("T")


class _Step:
    """How processes go through a pass. They belong to the machine, so there is one of these."""

    kept = False


class OutOfMemoryElsewhere(MemoryError):
    """Another process has run out of memory: all do the pass again."""


class _GaveUp:
    """What a process gives that cannot give what it was asked for."""


def keep_step() -> None:
    """From now on processes wait for each other inside passes too, as with FSDP: none can leave one, or do it again, alone."""
    _Step.kept = True


def in_step() -> bool:
    """Whether they do."""
    return _Step.kept


def exchange(value: T) -> list[T]:
    """What every process gives, in the order of their ranks. Returns when all have come here.

    Raises:
        PeerLostError: another process has ended.
    """
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with _all_present():
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _all_present() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for a connection that has broken
        raise PeerLostError(f"another process of this stage has ended ({error}).") from error


def gather(value: T) -> list[T]:
    """`exchange` at the end of a pass over rows: where one process is to stop, or has run out of memory, all hear of it here.

    Raises:
        Interrupted: a signal has come to one of the processes.
        OutOfMemoryElsewhere: what another process was asked for did not fit.
        PeerLostError: another process has ended.
    """
    if count() == 1:
        return [value]
    told = exchange((value, interruption.received()))
    for _, signal in told:
        if signal is not None:
            raise Interrupted(signal)
    if any(isinstance(given, _GaveUp) for given, _ in told):
        raise OutOfMemoryElsewhere("out of memory in another process")
    return [given for given, _ in told]


def give_up() -> None:
    """In the place of the next `gather`: this process has run out of memory in a pass, and all are to do it again."""
    if count() > 1:
        exchange((_GaveUp(), interruption.received()))


def of_main(work: Callable[[], T]) -> T:
    """What `work` gives in the main process, where alone it is done."""
    return exchange(work() if is_main() else None)[0]


def poll() -> None:
    """A place to stop at inside a pass. Of several processes, this one waits for the others in the place of their next `gather`.

    Raises:
        Interrupted: a signal has come.
        PeerLostError: another process has ended.
    """
    if count() == 1:
        interruption.poll()
    elif interruption.received() is not None and not in_step():
        gather(_GaveUp())


def block(items: Sequence[T]) -> Sequence[T]:
    """This process's part of a row of items: neighbours stay together."""
    return items[len(items) * rank() // count() : len(items) * (rank() + 1) // count()]


def dealt(rows: Tensor) -> Tensor:
    """This process's rows where they are dealt out like cards, one to each process in turn."""
    return rows[rank() :: count()]


@torch.no_grad()
def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Puts the sum over all processes in the place of each gradient; a parameter without a gradient has none anywhere.

    Raises:
        PeerLostError: another process has ended.
    """
    if count() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with _all_present():
        dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
