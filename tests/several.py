"""Work that is done by several processes over gloo, each with one thread."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def in_processes(count: int, scratch: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)` gives in each process, in the order of their ranks."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)  # children read it as they start
    try:
        mp.spawn(_one, (count, scratch, work, arguments), nprocs=count)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [torch.load(scratch / f"result-{rank}", weights_only=False) for rank in range(count)]


def _one(rank: int, count: int, scratch: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'meet'}", rank=rank, world_size=count)
    torch.save(work(*arguments), scratch / f"result-{rank}")
    dist.destroy_process_group()
