"""Our PPO iteration on the embedded model: seconds by beat, and memory after each iteration."""

from pathlib import Path
from typing import Any

from benchmarks.ours.roles import PACKAGES, Stopwatch, make_roles, open_backbone, train
from benchmarks.probe import Figures, peak_gb, resident_gb, serve
from benchmarks.setting import our_setting
from benchmarks.work import Work


def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured iteration's beats; peak and present memory after each iteration, warm-up included."""
    work = Work(**request["work"])
    setting = our_setting(work, request.get("changes"))
    roles = make_roles(open_backbone(Path(request["model"]), setting), setting)
    stopwatch = Stopwatch()
    peaks, residents = [], []

    def watch(done: int) -> None:
        if done:
            peaks.append(peak_gb())
            residents.append(resident_gb())

    train(roles, setting, work, stopwatch, watch)
    return {
        "seconds": stopwatch.seconds[work.warmup :],
        "peak_gb_after": peaks,
        "resident_gb_after": residents,
        "setting": setting.stated(),
    }


if __name__ == "__main__":
    serve(run, PACKAGES)
