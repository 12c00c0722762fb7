"""What machine this is and how busy; nothing but Python's own library."""

import os
import platform
from pathlib import Path
from typing import Any

from benchmarks.probe import WAITING

BUSY = 1.0  # processes that want a core, averaged over a minute


def describe() -> dict[str, Any]:
    """Processor, cores, what its matrix units can do, how threads wait. No host name."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "processor": name or platform.machine(),
        "cores": os.cpu_count(),
        "amx_bf16": " amx_bf16" in text,
        "avx512_bf16": " avx512_bf16" in text,
        "python": platform.python_version(),
        "waiting": WAITING,
    }


def load() -> list[float]:
    """As `uptime` says it: averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def refusal(load_average: float) -> str | None:
    """Why nothing is measured now; None where the machine is quiet."""
    if load_average <= BUSY:
        return None
    return (
        f"The load is {load_average:.2f} but must be at most {BUSY:g}: beside other processes torch is several times slower, "
        "and no ratio would mean anything. Wait until the machine is quiet, or say --busy to run all the same."
    )
