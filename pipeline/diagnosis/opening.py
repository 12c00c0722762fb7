"""The user's own case: params.yaml, prepared data and artifacts, with a policy that can start anew; nothing is written."""

from dataclasses import dataclass

import torch

from pipeline.classifier import Classifier
from pipeline.data.examples import Prompt, prompts
from pipeline.data.prepared import read_prompts
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import ParameterError
from pipeline.health.report import HealthLog
from pipeline.loop import Loop, open_loop
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
from pipeline.params.runtime import RuntimeParams
from pipeline.stage import Stage
from pipeline.tracking.tracker import Tracker


@dataclass(frozen=True)
class Case:
    """The loop of stage `ppo`, and what it is run with."""

    cfg: PPOParams
    reward: RewardParams
    loop: Loop
    questions: list[Prompt]
    tokenizer: ChatTokenizer

    @torch.no_grad()
    def restart(self) -> None:
        """The policy is a copy of sft again, the value head is 0."""
        policy = self.loop.policy
        for mine, theirs in zip(*map(policy.backbone.adapter_parameters, ("policy", "sft")), strict=True):
            mine.copy_(theirs)
        if policy.value_head is not None:
            for parameter in policy.value_head.parameters():
                parameter.zero_()


def untracked(name: str, seed: int, runtime: RuntimeParams) -> Stage:
    """A stage of which nothing reaches MLflow: its tracker has no run."""
    tracker = Tracker()
    return Stage(name, name, seed, runtime, tracker, HealthLog(name, tracker, {}))


def open_case(stage: Stage) -> Case:
    """The case of the working directory.

    Raises:
        DataError: a stage before ppo has not run.
        BaseModelError: an artifact does not fit the base.
        ParameterError: params.yaml is not sound, or the reward model is one that has a tokenizer of its own.
    """
    cfg = stage.params(PPOParams)
    questions = prompts(read_prompts(stage.input("prepared/ppo.jsonl")), stage.tokenizer)
    loop = open_loop(stage, cfg, questions)
    if isinstance(loop.reward_model, Classifier):
        raise ParameterError(
            "reward.from is a model with a tokenizer of its own, whose scores cannot be worked out a second way here; "
            "set it to null, or take the term reward_model out of ppo.reward, to look at the rest."
        )
    return Case(cfg, stage.params(RewardParams, "reward"), loop, questions, stage.tokenizer)
