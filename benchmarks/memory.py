"""The planned peak of a stage against the measured one: `python -m benchmarks.memory`; writes benchmarks/results/plan.json.

Each stage's loop runs in a process of its own for two steps (one iteration of PPO), on rows as long as the parameters let them be. Measured is the
largest resident set of the process, less what it was when everything was imported and no weight loaded.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import torch
from rich import box
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe
from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.base_model import locate
from pipeline.batch import Pairs, Rollout, Sequences
from pipeline.data.examples import Prompt, sequences
from pipeline.files import write_json
from pipeline.heads import ScalarHead, reward_head
from pipeline.lineage import versions
from pipeline.loading import load_backbone
from pipeline.objectives.offline import bradley_terry, sft
from pipeline.offline import train_offline
from pipeline.online import optimizer_for, train_online
from pipeline.planning.bases import configuration
from pipeline.planning.settings import CODE_PAGES, GIB, Machine, Settings, this_machine
from pipeline.planning.stages import plan_stage
from pipeline.progress import console
from pipeline.randomness import prepare_torch
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.stage import quiet_libraries
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth

RESULTS = Path("benchmarks/results/plan.json")
RECIPE = Path("recipes/demo.yaml")
STAGES = ("sft", "reward", "ppo")


@dataclass(frozen=True)
class Case:
    """A base and how it is used; None: as the demo recipe has it."""

    base: str
    microbatch_tokens: int | None = None
    max_prompt: int | None = None
    max_response: int | None = None
    checkpointing: bool = False

    def settings(self) -> Settings:
        """The demo recipe with what differs; steps of two micro-batches, so that gradients lie there before the second."""
        settings = Settings.read(RECIPE)
        budget = self.microbatch_tokens or settings.runtime.microbatch_tokens
        settings = settings.with_("runtime", microbatch_tokens=budget, gradient_checkpointing=self.checkpointing)
        settings = settings.with_("base", model=self.base)
        settings = settings.with_(
            "tokens",
            max_prompt=self.max_prompt or settings.tokens.max_prompt,
            max_response=self.max_response or settings.tokens.max_response,
        )
        size = max(2, budget // (settings.tokens.max_prompt + settings.tokens.max_response))
        settings = settings.with_("sft", batch_size=2 * size).with_("reward", batch_size=size)
        return settings.with_("ppo", iterations=1, rollout_size=8 * size, minibatch_size=2 * size, group_size=1)


CASES = {
    "SmolLM2-135M": Case("embedded"),
    "SmolLM2-135M, checkpointing": Case("embedded", checkpointing=True),
    "Qwen2.5-0.5B, random weights": Case("Qwen2.5-0.5B", microbatch_tokens=512, max_prompt=96, max_response=32),
}


def main() -> None:
    """All cases, or one stage of one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--folder", type=Path, help="the base; with --stage: measure here")
    chosen = parser.parse_args()
    quiet_libraries()
    if chosen.folder:
        print(json.dumps(measure(chosen.stage, CASES[chosen.case].settings(), chosen.folder)))
        return
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in [chosen.case] if chosen.case else CASES:
            folder = base_folder(CASES[name].base, Path(scratch))
            for stage in [chosen.stage] if chosen.stage else STAGES:
                rows.append(compare(name, stage, folder))
                console.print(f"{name}, {stage}: {rows[-1]}", markup=False)
                write_json(RESULTS, report(rows))  # after each, so that a run that is cut short is not lost
    console.print(table(rows))


def report(rows: list[dict]) -> dict[str, object]:
    """What benchmarks/results/plan.json holds; bytes."""
    return {
        "date": f"{date.today():%Y-%m-%d}",
        "machine": describe(),
        "glibc": platform.libc_ver()[1],
        "versions": versions(),
        "rows": rows,
    }


def compare(case: str, stage: str, folder: Path) -> dict[str, str | float]:
    """Planned and measured bytes above the process's own."""
    settings = CASES[case].settings()
    machine = this_machine(settings.runtime)
    plan = plan_stage(
        stage, settings, configuration(settings.base.model), Machine("", machine.device, machine.free, CODE_PAGES)
    )
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--stage", stage, "--folder", str(folder)]
    measured = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )
    return {
        "case": case,
        "stage": stage,
        "planned": plan.peak,
        "highest": plan.highest.name,
        **measured,
        "ratio": plan.peak / (measured["peak"] - measured["libraries"]),
    }


def measure(stage: str, settings: Settings, folder: Path) -> dict[str, int]:
    """Bytes of this process: before a weight is loaded, the most until it was, the most in all."""
    prepare_torch(0, settings.runtime)
    libraries = psutil.Process().memory_info().rss
    backbone = load_backbone(folder, settings.base, settings.runtime, BaseIdentity("0" * 64, 0, "benchmark"))
    loaded = highest()
    {"sft": run_sft, "reward": run_reward, "ppo": run_ppo}[stage](backbone, settings)
    return {"libraries": libraries, "loaded": loaded, "peak": highest()}


def highest() -> int:
    """The largest resident set so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_sft(backbone: Backbone, settings: Settings) -> None:
    """Two steps."""
    backbone.add_adapter("sft", settings.lora)
    model = Policy(backbone, "sft", 1.0, settings.runtime.logprob_chunk)
    offline(
        model,
        rows(settings, settings.sft.batch_size),
        [ParameterGroup("adapter", backbone.train("sft"), 1e-3)],
        lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR),
        settings,
    )


def run_reward(backbone: Backbone, settings: Settings) -> None:
    """Two steps."""
    backbone.add_adapter("reward", settings.lora)
    head = reward_head(backbone.hidden_size)
    offline(
        RewardModel(backbone, "reward", head),
        Pairs(rows(settings, settings.reward.batch_size), rows(settings, settings.reward.batch_size)),
        [
            ParameterGroup("adapter", backbone.train("reward"), 1e-3),
            ParameterGroup("head", [head.linear.weight], 1e-3),
        ],
        lambda scores, _: bradley_terry(*scores, 0.0, 0.0),
        settings,
    )


def run_ppo(backbone: Backbone, settings: Settings) -> None:
    """One iteration, scored by a reward model; the policy is kept before it and after."""
    cfg, runtime, tokens = settings.ppo, settings.runtime, settings.tokens
    for name in ("sft", "policy", "reward"):
        backbone.add_adapter(name, settings.lora)
    policy = Policy(backbone, "policy", 1.0, runtime.logprob_chunk, ScalarHead(backbone.hidden_size, 0.0))
    model = RewardModel(backbone, "reward", reward_head(backbone.hidden_size))
    optimizer = optimizer_for(policy, cfg)
    kept: list[Tensor] = []

    def keep(_: int) -> None:
        kept[:] = [parameter.detach().clone() for parameter in optimizer.parameters]

    def score(rollout: Rollout) -> Tensor:
        return model.score_minibatches(rollout, 0, runtime.microbatch_tokens, cfg.minibatch_size)

    questions = [Prompt(key, (), ids(tokens.max_prompt)) for key in range(cfg.rollout_size)]
    beyond = backbone.head_VH.shape[0]  # no token ends an answer
    train_online(
        policy,
        Policy(backbone, "sft", 1.0, runtime.logprob_chunk),
        score,
        [questions],
        optimizer,
        algorithm_of(cfg),
        cfg,
        Sampling(tokens.max_response, (beyond,), runtime.rollout_chunk, seed=1),
        runtime.microbatch_tokens,
        lambda *_: None,
        keep,
    )


def offline(
    model: Policy | RewardModel,
    batch: Sequences | Pairs,
    groups: list[ParameterGroup],
    objective: Callable,
    settings: Settings,
) -> None:
    """Two steps on one batch."""
    optimizer = Optimizer(groups, 1.0, cosine_to_tenth(2, 0.0))
    budget = settings.runtime.microbatch_tokens
    train_offline(model, [batch] * 2, optimizer, objective, budget, dropout=True, log=lambda *_: None)


def rows(settings: Settings, count: int) -> Sequences:
    """Rows of full length."""
    tokens = settings.tokens
    return sequences([(ids(tokens.max_prompt), ids(tokens.max_response)) for _ in range(count)])


def ids(count: int) -> list[int]:
    """Random tokens."""
    return torch.randint(3, 300, (count,)).tolist()


def base_folder(base: str, scratch: Path) -> Path:
    """The embedded base, or random weights of a configuration."""
    if base == "embedded":
        return locate(base)
    folder = scratch / base
    if not folder.exists():
        AutoModelForCausalLM.from_config(configuration(base), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def table(rows: list[dict]) -> Table:
    """For docs/memory.md."""
    shown = Table(box=box.MARKDOWN)
    for column in ("base", "stage", "planned, GiB", "measured, GiB", "planned / measured", "highest pass"):
        shown.add_column(column)
    for row in rows:
        above = row["peak"] - row["libraries"]
        figures = (f"{row['planned'] / GIB:.2f}", f"{above / GIB:.2f}", f"{row['ratio']:.2f}")
        shown.add_row(row["case"], row["stage"], *figures, row["highest"])
    return shown


if __name__ == "__main__":
    main()
