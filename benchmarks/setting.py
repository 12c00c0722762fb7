"""Our ONE setting: every figure of ours comes from it, but for those that say what they change.

It is recipes/demo.yaml with the changes below. What changes speed or memory and not the work stands in RUNTIME.
"""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.work import Work
from pipeline.params.base import BaseParams, LoraParams
from pipeline.params.ppo import PPOParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section

RECIPE = "recipes/demo.yaml"
RUNTIME: dict[str, Any] = {
    "device": "cpu",
    "microbatch_tokens": 512,
}
GPU_RUNTIME: dict[str, Any] = {  # at rows of 512 tokens
    "microbatch_tokens": 4096,
    "rollout_chunk": 64,
}
Changes = dict[str, dict[str, Any]]
ROLLOUT_VARIANTS: dict[str, Changes] = {  # what a rollout takes with one thing changed
    "ours, decoder: transformers": {"runtime": {"decoder": "transformers"}},
    "ours, sampling_weights: merged": {"ppo": {"sampling_weights": "merged"}},
    "ours, attention: sdpa": {"runtime": {"attention": "sdpa"}},
}


@dataclass(frozen=True)
class Setting:
    """Sections of params.yaml."""

    base: BaseParams
    lora: LoraParams
    runtime: RuntimeParams
    ppo: PPOParams

    def changed(self, changes: Changes) -> "Setting":
        """With other values, section by section, checked as params.yaml is."""
        sections = {name: getattr(self, name) for name in changes}
        return replace(
            self, **{name: type(old)(**(old.model_dump() | changes[name])) for name, old in sections.items()}
        )

    def stated(self) -> Changes:
        """All values, for the output."""
        return {name: getattr(self, name).model_dump() for name in ("base", "lora", "runtime", "ppo")}


def our_setting(work: Work, changes: Changes | None = None) -> Setting:
    """The setting at the given work, with what a figure says that it changes."""
    recipe = Setting(
        load_section("base", BaseParams, RECIPE),
        load_section("lora", LoraParams, RECIPE),
        load_section("runtime", RuntimeParams, RECIPE),
        load_section("ppo", PPOParams, RECIPE),
    )
    equal_work: Changes = {
        "base": {"quantization": "none", "dtype": "bfloat16"},  # the peer's weights have 16 bits
        "lora": {"r": work.lora_r, "alpha": 2.0 * work.lora_r, "dropout": 0.0, "targets": "all-linear"},
        "runtime": {"threads": work.threads} | RUNTIME,
        "ppo": {
            "algorithm": "ppo",
            "iterations": work.warmup + work.iterations,
            "rollout_size": work.rows,
            "minibatch_size": work.rows,
            "epochs": work.epochs,
            "lr": 1e-5,
            "kl_coef": 0.05,
            "stop_kl": None,  # every planned step is taken
        },
    }
    return recipe.changed(equal_work).changed(changes or {})


def microbatch(runtime: RuntimeParams) -> int:
    """The size of a micro-batch as the loops take it."""
    return runtime.microbatch_tokens


def rows_at_once(runtime: RuntimeParams, row_tokens: int) -> int:
    """Rows of a micro-batch where all have so many tokens; the peer is given as many."""
    return max(1, runtime.microbatch_tokens // row_tokens)
