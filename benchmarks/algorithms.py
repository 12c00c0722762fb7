"""Does each algorithm learn? A reward that one can check, on a tiny random model, through `train_online` itself.

An answer has up to three tokens out of eight. Which token is right depends on the prompt and on the position, and the score is
the share of the three positions that are right: 1 is the most there is, guessing brings about 0.1. An algorithm has learnt when
its sampled answers scored 0.9 or more in three iterations running.

python -m benchmarks.algorithms
"""

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

import tempfile
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import torch
import transformers
from torch import Tensor

from pipeline.algorithms import ALGORITHMS, Algorithm, algorithm_of
from pipeline.backbone import BaseIdentity
from pipeline.batch import Rollout
from pipeline.data.examples import Prompt
from pipeline.heads import ScalarHead
from pipeline.loading import load_backbone
from pipeline.online import optimizer_for, prompts_in_turn, train_online
from pipeline.params.base import BaseParams, LoraParams
from pipeline.params.ppo import PPOParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section, read_params
from pipeline.roles import Policy
from pipeline.rollout import Sampling
from pipeline.tiny import tiny_model

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.yaml"
VOCABULARY, END, KINDS, POSITIONS = 8, 2, 2, 3
RIGHT = torch.tensor([[0, 1, 3], [4, 0, 5]])  # of each kind of prompt, at each position
ENOUGH, IN_A_ROW = 0.9, 3
CHANGES = {
    "rollout_size": 256,
    "minibatch_size": 64,
    "lr": 2e-3,
    "value_lr": 1e-2,
    "warmup_steps": 0,
    "kl_coef": 0.03,
    "stop_kl": 0.05,
    "missing_eos_penalty": 0.0,
}
OWN_CHANGES = {
    # nothing corrects it for answers of an older policy: one step per rollout, and a longer one
    "reinforce": {"epochs": 1, "minibatch_size": 256, "lr": 5e-3},
    # the standard deviation of a few answers is noise, and dividing by it makes a nat relatively cheap
    "grpo": {"group_size": 16, "kl_coef": 0.1},
}
# prompts of one kind are alike but for their key, so that each draws noise of its own
PROMPTS = [Prompt(key, (), [6 + key % KINDS] * 3) for key in range(256)]


def share_right(rollout: Rollout) -> Tensor:
    """The reward; [B]."""
    ids_BR, mask_BR = rollout.response_ids_BR, rollout.response_mask_BR
    right_BR = RIGHT[rollout.prompt_ids_B % KINDS, : ids_BR.shape[1]] == ids_BR
    return (right_BR & mask_BR).sum(1) / POSITIONS


def learnt(scores: list[float]) -> bool:
    """The last three iterations were all good enough."""
    return len(scores) >= IN_A_ROW and min(scores[-IN_A_ROW:]) >= ENOUGH


def learn(
    name: str,
    seed: int,
    folder: Path,
    spoil: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    iterations: int = 80,
) -> list[float]:
    """The mean score of each iteration, until it has learnt or they are over.

    Args:
        folder: a tiny model.
        spoil: puts faults into the algorithm, to see that without it nothing is learnt.
    """
    chosen = {"algorithm": name, "iterations": iterations}
    cfg = PPOParams(**(read_params(RECIPE)["ppo"] | CHANGES | OWN_CHANGES.get(name, {}) | chosen))
    torch.manual_seed(seed)
    base = BaseParams(model="tiny", quantization="none", dtype="float32", trust_remote_code=False)
    runtime = load_section("runtime", RuntimeParams, RECIPE)
    backbone = load_backbone(folder, base, runtime, BaseIdentity("benchmark", VOCABULARY, "tiny"))
    for adapter in ("sft", "policy"):  # fresh ones change nothing, so that the policy starts as a copy of the reference
        backbone.add_adapter(adapter, LoraParams(r=8, alpha=16.0, dropout=0.0, targets="all-linear"))
    algorithm = spoil(algorithm_of(cfg))
    value_head = ScalarHead(backbone.hidden_size, std=0.0) if algorithm.critic_objective else None
    policy = Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head)
    scores: list[float] = []
    train_online(
        policy,
        Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk),
        share_right,
        takewhile(lambda _: not learnt(scores), prompts_in_turn(PROMPTS, cfg, seed)),
        optimizer_for(policy, cfg),
        algorithm,
        cfg,
        Sampling(POSITIONS, (END,), cfg.rollout_size, seed),
        cfg.minibatch_size,
        lambda _, stats, __: scores.append(stats["score_mean"]),
        lambda _: None,
    )
    return scores


def write_model(folder: Path) -> None:
    """The tiny model that all learn on."""
    tiny_model(vocab_size=VOCABULARY).save_pretrained(folder)


def main() -> None:
    """Prints a table of all algorithms on three seeds."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, 1 thread")
    print("| algorithm | seed | iterations to 0.9 | score at the start | score at the end | seconds |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name in ALGORITHMS:
            for seed in range(3):
                started = time.monotonic()
                scores = learn(name, seed, Path(folder))
                reached = str(len(scores)) if learnt(scores) else "not in 80"
                end = sum(scores[-IN_A_ROW:]) / IN_A_ROW
                seconds = time.monotonic() - started
                print(f"| {name} | {seed} | {reached} | {scores[0]:.2f} | {end:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
