"""A small world for reinforcement learning: a policy that starts as its reference, and a score that one can work out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from conftest import LORA, ROOT
from torch import Tensor, nn

from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Experience, Rollout
from pipeline.data.examples import Prompt
from pipeline.evaluation import Score, evaluate
from pipeline.heads import ScalarHead
from pipeline.online import train_online
from pipeline.params.base import LoraParams
from pipeline.params.ppo import PPOParams
from pipeline.params.section import read_params
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling, generate
from pipeline.update import Optimizer, ParameterGroup, UpdatePlan, accumulate, constant_after_warmup, update

PROMPTS = [Prompt(key, (), [5 + (key * 7 + place) % 200 for place in range(3 + 3 * key)]) for key in range(8)]
SAMPLING = Sampling(max_new_tokens=10, stop_ids=tuple(range(2, 320, 12)), chunk=64, seed=3)
TO_THE_LIMIT = replace(SAMPLING, stop_ids=(320,))  # no token of the tiny vocabulary ends an answer
DEMO_PPO = read_params(ROOT / "recipes" / "demo.yaml")["ppo"]
FAMILIES = ("llama", "gpt2", "qwen2")
LINEARS = {
    "llama": 14,
    "gpt2": 8,
    "qwen2": 14,
}  # in two blocks: q, k, v, o, gate, up, down; or c_attn, c_proj, c_fc, c_proj


@dataclass(frozen=True)
class Setting:
    """How a tiny base is held and run."""

    family: str
    dtype: str
    quantization: str
    checkpointing: bool = False

    def __str__(self) -> str:
        words = [self.family, self.dtype, self.quantization, "checkpointing" if self.checkpointing else "plain"]
        return "-".join(words)

    @property
    def keys(self) -> dict[str, Any]:
        """The same for `make_backbone`."""
        return {
            "family": self.family,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "gradient_checkpointing": self.checkpointing,
        }


BASES = [
    Setting(family, dtype, quantization)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16")
    for quantization in ("none", "nf4")
]
SETTINGS = [Setting(base.family, base.dtype, base.quantization, on) for base in BASES for on in (False, True)]


def ppo_params(**changes: Any) -> PPOParams:
    """The demo recipe's, but two minibatches and two epochs over the eight prompts, with changes."""
    small = {"iterations": 2, "rollout_size": 8, "minibatch_size": 4, "epochs": 2}
    return PPOParams(**(DEMO_PPO | small | changes))


def lengths_B(rollout: Rollout) -> Tensor:
    """A score that one can work out: the number of tokens."""
    return rollout.response_lengths_B.float()


class World:
    """A policy that is a copy of the reference, a value head, a reward model, and an optimizer for the first two."""

    def __init__(
        self,
        make_backbone: Callable[..., Backbone],
        cfg: PPOParams | None = None,
        lr: float = 1e-2,
        score: Score = lengths_B,
        sampling: Sampling = SAMPLING,
        prompts: list[Prompt] = PROMPTS,
        microbatch_rows: int = 3,
        lora: LoraParams = LORA,
        **backbone_keys: Any,
    ):
        self.cfg = cfg or ppo_params()
        self.score = score
        self.sampling = sampling
        self.prompts = prompts
        self.microbatch_rows = microbatch_rows
        self.backbone = make_backbone(adapters=("sft", "reward"), lora=lora, **backbone_keys)
        self.backbone.add_adapter("policy", lora)
        with torch.no_grad():
            for mine, theirs in zip(*map(self.backbone.adapter_parameters, ("policy", "sft")), strict=True):
                mine.copy_(theirs)
        self.value_head = ScalarHead(self.backbone.hidden_size, std=0.0)
        self.policy = Policy(self.backbone, "policy", self.cfg.temperature, 16, self.value_head)
        self.reference = Policy(self.backbone, "sft", self.cfg.temperature, 16)
        self.reward_model = RewardModel(self.backbone, "reward", ScalarHead(self.backbone.hidden_size, std=0.1))
        self.optimizer = Optimizer(
            [
                ParameterGroup("policy", self.backbone.train("policy"), lr),
                ParameterGroup("value", list(self.value_head.parameters()), lr),
            ],
            self.cfg.max_grad_norm,
            constant_after_warmup(0),
        )

    def rollout(self) -> Rollout:
        """Answers to the prompts; the same as long as the policy is the same."""
        return generate(self.policy, self.prompts, self.sampling, step=0)

    def tokens(self, rows: int) -> int:
        """Those of so many of the longest rows that there can be: shorter ones share a micro-batch with more."""
        return rows * (max(len(prompt.ids) for prompt in self.prompts) + self.sampling.max_new_tokens)

    def evaluate(self, rollout: Rollout, microbatch_rows: int) -> Experience:
        """Beat 2."""
        return evaluate(
            rollout,
            self.policy,
            self.reference,
            self.score,
            algorithm_of(self.cfg),
            self.cfg,
            self.tokens(microbatch_rows),
        )

    def experience(self, microbatch_rows: int) -> Experience:
        """Beats 1 and 2."""
        return self.evaluate(self.rollout(), microbatch_rows)

    def update(self, experience: Experience, microbatch_rows: int) -> dict[str, float]:
        """Beat 3."""
        plan = UpdatePlan(self.cfg.epochs, self.cfg.minibatch_size, self.tokens(microbatch_rows), self.cfg.stop_kl)
        with self.backbone.training(dropout=False):
            return update(self.policy, self.optimizer, experience, algorithm_of(self.cfg).objective, plan, seed=1)

    def gradients(self, experience: Experience, microbatch_rows: int) -> list[Tensor]:
        """Of the whole experience as one minibatch: the adapter's parameters first, then the head's; no step is taken."""
        self.optimizer.zero_grad()
        with self.backbone.training(dropout=False):
            accumulate(self.policy, experience, algorithm_of(self.cfg).objective, self.tokens(microbatch_rows))
        return [parameter.grad.clone() for group in self.optimizer.groups for parameter in group.parameters]

    def train(self, iterations: int, log: Callable = lambda *_: None, watch: Callable = lambda _: None) -> None:
        """All beats, on the same prompts every time."""
        train_online(
            self.policy,
            self.reference,
            self.score,
            [self.prompts] * iterations,
            self.optimizer,
            algorithm_of(self.cfg),
            self.cfg,
            self.sampling,
            self.tokens(self.microbatch_rows),
            log,
            watch,
        )


def blocks(backbone: Backbone) -> nn.ModuleList:
    """The model's layers, whatever the family calls them."""
    return next(module for module in backbone.decoder.children() if isinstance(module, nn.ModuleList))


def flat(gradients: list[Tensor]) -> Tensor:
    """As one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def relative_distance(one: Tensor, other: Tensor) -> float:
    """|one - other| / |other|."""
    return float((one - other).norm() / other.norm())
