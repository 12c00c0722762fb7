"""A stage in several processes on one machine: torchrun starts the stage's own command once for each.

The command that DVC knows does not change with their number. Whoever calls torchrun himself, on several machines for one, starts
that same command, and finds `runtime.processes` of them in all.
"""

import contextlib
import datetime
import logging
import os
import sys
import time
from collections.abc import Iterator
from signal import SIGTERM, Signals

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeline import processes, ranks
from pipeline.errors import ParameterError, PeerLostError, TrainingError, UserError
from pipeline.interruption import Interrupted
from pipeline.params.runtime import RuntimeParams
from pipeline.processes import TORCHRUN

UNDIVIDED = ("prepare", "warmup")  # stages without a pass that is worth dividing
GRACE_SECONDS = 45  # from a signal, or the end of one process, to the end of all
UNHURRIED = datetime.timedelta(
    days=7
)  # the main process may be long at work alone; that one has died is seen by torchrun
PEER_SECONDS = 2  # the process that ended first is to be seen first


def is_due(stage: str, runtime: RuntimeParams) -> bool:
    """Whether processes are still to be started for the stage."""
    return runtime.launch != "single" and stage not in UNDIVIDED and TORCHRUN not in os.environ


def start(stage: str, processes: int) -> None:
    """Runs the present command in so many processes, to their end.

    Raises:
        Interrupted: a signal has stopped them.
        TrainingError: one has failed; says what it said.
    """
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False  # what it would say is said below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=stage,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=GRACE_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
    except SignalException as stop:
        raise Interrupted(Signals(stop.sigval)) from None
    except ChildFailedError as error:
        raise _cause(error.failures, processes) from None


@contextlib.contextmanager
def joined(stage: str, runtime: RuntimeParams) -> Iterator[None]:
    """In each of the processes: they know each other.

    Raises:
        ParameterError: there are not as many as `runtime` says.
    """
    wanted = 1 if runtime.launch == "single" or stage in UNDIVIDED else runtime.processes
    if processes.count() != wanted:
        raise ParameterError(
            f"runtime.launch is {runtime.launch} and runtime.processes {runtime.processes}, so {stage} wants {wanted} processes, "
            f"but torchrun has started {processes.count()}; change one of them, or start the stage without torchrun."
        )
    if processes.count() == 1:
        yield
        return
    gpu = runtime.device != "cpu" and torch.cuda.is_available()
    if gpu:
        if (place := int(os.environ["LOCAL_RANK"])) >= torch.cuda.device_count():
            raise ParameterError(
                f"runtime.processes is {runtime.processes} but this machine has {torch.cuda.device_count()} GPUs, and each process "
                "takes one; set it to that number or less."
            )
        torch.cuda.set_device(place)
    if runtime.launch == "fsdp":
        ranks.keep_step()
    # what is no tensor goes over gloo on every machine
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=UNHURRIED)
    yield
    dist.destroy_process_group()  # not after an error: it would wait for those that are gone


def hand_over(error: BaseException) -> None:
    """In one of the processes, before it fails: what it fails of, for `start` to say."""
    get_error_handler().record_exception(error)
    if isinstance(error, PeerLostError):
        time.sleep(PEER_SECONDS)


def _cause(failures: dict[int, ProcessFailure], processes: int) -> UserError | Interrupted:
    """The first failure that no other one has caused; they are in the order in which they were seen."""

    def said(rank: int) -> str:
        told = failures[rank].message  # torch's annotation says str
        return told["message"] if isinstance(told, dict) else told

    def order(rank: int) -> tuple[bool, int]:
        ended_by_torchrun = failures[rank].exitcode == -SIGTERM
        return ended_by_torchrun or said(rank).startswith(PeerLostError.__name__), failures[rank].timestamp

    rank = min(failures, key=order)
    status = failures[rank].exitcode
    if status > 128:  # as a shell has it: stopped by a signal that came to one of them
        return Interrupted(Signals(status - 128))
    return TrainingError(f"process {rank} of {processes} failed: {said(rank)}")
