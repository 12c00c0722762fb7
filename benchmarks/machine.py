"""What machine this is and how busy; nothing but Python's own library."""

import os
import platform
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Moment:
    """Seconds: of the clock; that all cores together were busy; of them in this process and the children that it has waited for."""

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Moment":
        """Read from the kernel."""
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
        user, nice, system, _, _, irq, softirq, steal = ticks[:8]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), busy, sum(os.times()[:4]))

    def others_share(self, later: "Moment", cores: int) -> float:
        """The share of all cores that other processes had until `later`."""
        others = (later.busy - self.busy) - (later.own - self.own)
        return max(0.0, others) / ((later.clock - self.clock) * cores)


def refusal(load_average: float) -> str | None:
    """Why nothing is measured now; None where the machine is quiet."""
    if load_average <= BUSY:
        return None
    return (
        f"The load is {load_average:.2f} but must be at most {BUSY:g}: beside other processes torch is several times slower, "
        "and no ratio would mean anything. Wait until the machine is quiet, or say --busy to run all the same."
    )
