"""How OpenMP threads should wait: forward and backward of the embedded model alone and beside a second such process.

python -m benchmarks.thread_waiting        (alone on the machine; a quarter of an hour, most of it two processes that spin)
"""

import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.parts import embedded_policy, random_rows

# libgomp: how many turns a waiting thread spins before it sleeps. Its own default is 300,000.
SETTINGS = {
    "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "spin 2,000 (ours)": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"},
    "spin 20,000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
}
ROWS, TOKENS, REPEATS = 16, 58, 4


def measure() -> float:
    """Tokens per second of forward and backward in this process."""
    policy = embedded_policy()
    batch = random_rows(ROWS, TOKENS // 2, TOKENS // 2)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with policy.backbone.training(dropout=False):
            policy(batch).logprobs_BR.sum().backward()
        seconds.append(time.perf_counter() - started)
    assert torch.get_num_threads() > 1, "one thread waits for nobody"
    return ROWS * TOKENS / statistics.median(seconds[1:])


def main() -> None:
    """Prints a table: each setting, alone and two at once, and its ratio to ours."""
    found = {}
    for name, settings in SETTINGS.items():
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_WAIT", "GOMP_SPIN"))}
        words = [sys.executable, "-m", "benchmarks.thread_waiting", "measure"]
        rates = []
        for processes in (1, 2):
            started = [
                subprocess.Popen(words, env=environment | settings, stdout=subprocess.PIPE, text=True)
                for _ in range(processes)
            ]
            rates.append(sum(float(process.communicate()[0]) for process in started))
        found[name] = rates
    alone, together = found["spin 2,000 (ours)"]
    for name, rates in found.items():
        print(
            f"{name:20} alone {rates[0]:5.0f} tokens/s ({rates[0] / alone:.2f} of ours), "
            f"two at once {rates[1]:5.0f} in all ({rates[1] / together:.2f} of ours)"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(measure())
    else:
        main()
