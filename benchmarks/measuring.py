"""Time and peak memory of one piece of work in a process of its own (Linux)."""

import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20


def resident_bytes(kind: str) -> int:
    """The resident set of this process: VmRSS now, VmHWM at its peak. (ru_maxrss would count the parent's before exec.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{kind}:\s+(\d+) kB", status)[1]) * 1024


def measured(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds of all runs but the first, and MiB at the peak of all above what was resident before."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(seconds[1:] or seconds),
        "peak_mib": (resident_bytes("VmHWM") - before) / MIB,
        "before_mib": before / MIB,
    }


def in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` returns in a new interpreter: memory that other work has left is not in its figures."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def as_line(**fields: Any) -> str:
    """One JSON object on a line."""
    return json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()})
