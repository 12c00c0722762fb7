"""Time and peak memory of one piece of work in a process of its own.

A peak is that of the resident set, as the kernel counts it, above what the process held before the work.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 2**20


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds of all runs but the first, and MiB at the peak above that before the first."""
    before = peak_bytes()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[1:] or seconds), "peak_mib": (peak_bytes() - before) / MIB}


def in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` returns in a new interpreter: peaks of other work are not in its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def as_line(**fields: Any) -> str:
    """One JSON object on a line."""
    return json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()})
