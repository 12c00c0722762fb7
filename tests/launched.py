"""A stage on a tiny model, as a command: `python launched.py sft|ppo FOLDER`. What it is to suffer stands in files of its folder.

fail-RANK: that process raises an error at step 2. hold: all wait at step 3 until it is gone.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from conftest import backbone_in
from test_several_processes import ROWS, TOKENS
from worlds import World, ppo_params

from pipeline import processes
from pipeline.algorithms import algorithm_of
from pipeline.data.examples import epochs_of
from pipeline.objectives.offline import sft
from pipeline.offline import train_offline
from pipeline.online import optimizer_for, train_online
from pipeline.params.base import LoraParams
from pipeline.recovery import recovery_of
from pipeline.roles import Policy
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth

DROPOUT = LoraParams(r=4, alpha=8.0, dropout=0.3, targets="all-linear")
FOLDER = Path(sys.argv[2])


def suffer(step: int) -> None:
    """What the test wants, once step `step` is done."""
    Path(f"at-{step}-{processes.rank()}").write_text(str(os.getpid()), encoding="utf-8")
    if step == 2 and Path(f"fail-{processes.rank()}").exists():
        raise RuntimeError("a wheel came off")
    while step == 3 and Path("hold").exists():
        time.sleep(0.05)


def offline(stage: Stage) -> str:
    """Two epochs of seven rows in batches of three, with dropout."""
    backbone = backbone_in(FOLDER, lora=DROPOUT, launch=stage.runtime.launch)
    optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 1e-2)], 1.0, cosine_to_tenth(6, 0.2))

    def log(step: int, stats: dict[str, float]) -> None:
        stage.log(step, stats)
        suffer(step)

    train_offline(
        Policy(backbone, "sft", 1.0, 16), epochs_of(ROWS, 3, 2, 4), optimizer,
        lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR), TOKENS, True, log, recovery_of(stage),
    )  # fmt: skip
    return backbone.adapter_hash("sft")


def online(stage: Stage) -> str:
    """Five iterations of PPO, two optimizer steps in each."""
    cfg = ppo_params(normalize_scores=True, kl_target=0.5, stop_kl=None, epochs=1)
    world = World(lambda **keys: backbone_in(FOLDER, launch=stage.runtime.launch, **keys), cfg)
    optimizer = optimizer_for(world.policy, cfg)

    def log(step: int, stats: dict[str, float], _: Any) -> None:
        stage.log(step, stats)
        suffer(step)

    train_online(
        world.policy, world.reference, world.score, [world.prompts] * 5, optimizer, algorithm_of(cfg), cfg,
        world.sampling, TOKENS, log, lambda _: None, recovery=recovery_of(stage),
    )  # fmt: skip
    return world.backbone.adapter_hash("policy")


def body(stage: Stage) -> None:
    """Trains and says what came out; the outputs are those that dvc.yaml names."""
    found = {"sft": offline, "ppo": online}[stage.name](stage)
    Path(f"hash-{processes.rank()}").write_text(found, encoding="utf-8")
    stage.finish({"steps": len(stage.curves)})
    if processes.is_main():
        for path in ("artifacts/sft", "artifacts/policy", "artifacts/development"):
            Path(path).mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    run_stage(sys.argv[1], body)
