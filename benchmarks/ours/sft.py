"""Our SFT step on the embedded model, through the stages' loop."""

from pathlib import Path
from typing import Any

from benchmarks.ours.offline import sft_seconds
from benchmarks.ours.roles import PACKAGES, open_backbone
from benchmarks.probe import Figures, serve
from benchmarks.setting import our_setting
from benchmarks.work import Work


def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured optimizer step over `work.rows` rows of prompt and answer."""
    work = Work(**request["work"])
    setting = our_setting(work, request.get("changes"))
    backbone = open_backbone(Path(request["model"]), setting)
    seconds = sft_seconds(backbone, setting, work)
    return {"seconds": seconds[work.warmup :]}


if __name__ == "__main__":
    serve(run, PACKAGES)
