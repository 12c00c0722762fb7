"""One measurement in a process of its own: a request goes in as JSON, figures come back as JSON.

Both environments import this, so it needs nothing but Python's own library. Memory is `ru_maxrss` of the fresh process. It starts at
what the parent held when it forked, so whoever calls `measure` imports no torch.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# The same for both sides. Threads that spin for long collapse as soon as anything else runs (docs/performance.md).
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LAST_LINES = 15

Figures = dict[str, Any]


class ProbeError(Exception):
    """A measuring process did not come to its end; says its last lines."""


def measure(python: Path, module: str, request: dict[str, Any]) -> Figures:
    """Figures of `python -m module` for a request.

    Raises:
        ProbeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        done = subprocess.run(
            [str(python), "-m", module, json.dumps(request), str(answer)],
            cwd=ROOT,
            env=os.environ | WAITING | OFFLINE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
            raise ProbeError(f"{module} ended with status {done.returncode}; its last lines:\n{last}")
        return json.loads(answer.read_text(encoding="utf-8"))


def serve(function: Callable[[dict[str, Any]], Figures], packages: tuple[str, ...]) -> None:
    """The other end: answers the request of the command line, and adds this process's memory and versions.

    imported_gb: before the function ran, with every library imported; peak_gb: at the end. GB are 10^9 bytes.
    """
    imported = peak_gb()
    figures = function(json.loads(sys.argv[1]))
    figures |= {
        "imported_gb": imported,
        "peak_gb": peak_gb(),
        "versions": {package: version(package) for package in packages},
    }
    Path(sys.argv[2]).write_text(json.dumps(figures), encoding="utf-8")


def peak_gb() -> float:
    """The most memory that this process has held so far (resident set), in 10^9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def resident_gb() -> float:
    """What this process holds now, in 10^9 bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9
