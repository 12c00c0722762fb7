"""The loop of stage `ppo` as the user's parameters and artifacts make it, to be run in pieces; nothing is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.algorithms import ppo as ppo_algorithm
from pipeline.batch import Experience
from pipeline.data.examples import Prompt, prompts
from pipeline.data.prepared import read_prompts
from pipeline.evaluation import Score
from pipeline.heads import ScalarHead
from pipeline.online import train_online
from pipeline.opening import open_base
from pipeline.params.ppo import PPOParams
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.stage import Stage
from pipeline.update import Optimizer, ParameterGroup, constant_after_warmup
from pipeline.weights import load_head

SFT, REWARD = Path("artifacts/sft"), Path("artifacts/reward")


@dataclass
class Loop:
    """Everything that stage `ppo` hands to `train_online`, with the policy able to start anew."""

    cfg: PPOParams
    policy: Policy
    reference: Policy
    reward_model: RewardModel
    score: Score
    questions: list[Prompt]
    sampling: Sampling
    microbatch_size: int
    end_id: int

    def optimizer(self, cfg: PPOParams) -> Optimizer:
        """A fresh one over policy adapter and value head."""
        groups = [
            ParameterGroup("policy", self.policy.backbone.train("policy"), cfg.lr),
            ParameterGroup("value", list(self.policy.value_head.parameters()), cfg.value_lr),
        ]
        return Optimizer(groups, cfg.max_grad_norm, constant_after_warmup(cfg.warmup_steps))

    @torch.no_grad()
    def restart(self) -> None:
        """The policy is a copy of sft again, the value head is 0."""
        backbone = self.policy.backbone
        for mine, theirs in zip(*map(backbone.adapter_parameters, ("policy", "sft")), strict=True):
            mine.copy_(theirs)
        for parameter in self.policy.value_head.parameters():
            parameter.zero_()

    def run(
        self,
        cfg: PPOParams,
        batches: list[list[Prompt]],
        log: Callable[[int, dict[str, float], Experience], None],
        **instead: object,
    ) -> None:
        """`train_online` over the batches; `instead` replaces some of what it is given."""
        given = {
            "policy": self.policy,
            "reference": self.reference,
            "score": self.score,
            "prompts": batches,
            "optimizer": None,
            "algorithm": None,
            "cfg": cfg,
            "sampling": self.sampling,
            "microbatch_size": self.microbatch_size,
            "log": log,
            "watch": lambda _: None,
        } | instead
        given["optimizer"] = given["optimizer"] or self.optimizer(cfg)
        given["algorithm"] = given["algorithm"] or ppo_algorithm(cfg)
        train_online(**given)


def open_loop(stage: Stage) -> Loop:
    """The loop over the stage's artifacts.

    Raises:
        DataError: a stage before this one has not run.
        BaseModelError: an artifact does not fit the base.
    """
    cfg, runtime, tokenizer = stage.params(PPOParams), stage.runtime, stage.tokenizer
    questions = prompts(read_prompts(stage.input("prepared/ppo.jsonl")), tokenizer)
    folders = {"sft": stage.input(str(SFT)), "policy": SFT, "reward": stage.input(str(REWARD))}
    backbone = open_base(stage)
    for name, folder in folders.items():
        backbone.load_adapter(name, folder)
    value_head = ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device)
    reward_model = RewardModel(backbone, "reward", load_head(REWARD, backbone.hidden_size, backbone.device))

    def score(rollout: Experience) -> Tensor:
        return reward_model.score(rollout.ended(tokenizer.end_id))

    return Loop(
        cfg,
        Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head),
        Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk),
        reward_model,
        score,
        questions,
        Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed),
        runtime.microbatch_size,
        tokenizer.end_id,
    )
