"""How fast this machine multiplies and moves bytes at its best; on the CPU or on a GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

import torch

from benchmarks.probe import serve

SQUARE = {"cpu": 2048, "cuda": 8192}  # large enough for the best rate, small enough to take no time
MEGABYTES = {"cpu": (256, 1024), "cuda": (1024, 4096)}


def seconds_of(function: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 2) -> list[float]:
    """Wall-clock seconds of each call, the device having finished."""
    seconds = []
    for _ in range(warmup + repeats):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[warmup:]


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a square product, the median of many."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2 * size**3 / statistics.median(seconds_of(lambda: torch.mm(left, right, out=out), device, 25, 5))


def bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second, read or copied (a copy reads and writes), whichever is faster."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = 2 * size / statistics.median(seconds_of(lambda: target.copy_(source), device, 7))
    return max(copied, size / statistics.median(seconds_of(source.sum, device, 7)))


@torch.no_grad()
def rates(device: torch.device) -> dict[str, float]:
    """flops (bfloat16) and bandwidth, per second."""
    kind = device.type
    return {
        "flops": matmul_rate(device, torch.bfloat16, SQUARE[kind]),
        "bandwidth": max(bandwidth(device, megabytes) for megabytes in MEGABYTES[kind]),
    }


def _run(request: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(request["work"]["threads"])
    return rates(torch.device("cpu"))


if __name__ == "__main__":
    serve(_run, ("torch",))
