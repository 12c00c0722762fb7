"""Our side, by the project's own objects: the roles on one backbone, and the real loop with a stopwatch at its beats.

Where the loop's interface changes, this module and benchmarks/setting.py follow; the measurements do not.
"""

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.setting import Setting, microbatch
from benchmarks.work import Work, prompt_ids
from pipeline import online
from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.batch import Experience
from pipeline.data.examples import Prompt
from pipeline.heads import ScalarHead, reward_head
from pipeline.loading import load_backbone
from pipeline.online import optimizer_for, train_online
from pipeline.randomness import prepare_torch
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.update import Optimizer

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
NO_STOP = (-1,)  # no token has this id: every answer has its full length
END_ID = 2  # put after cut answers for the reward model; <|im_end|> of the embedded model


def open_backbone(folder: Path, setting: Setting) -> Backbone:
    """The embedded model as the stages load it, seeded, without adapters."""
    prepare_torch(0, setting.runtime)
    return load_backbone(folder, setting.base, setting.runtime, BaseIdentity("benchmark", 1, "embedded"))


@dataclass(frozen=True)
class Roles:
    """What stage ppo has on its backbone, and the optimizer over the policy and its critic."""

    policy: Policy
    reference: Policy
    reward_model: RewardModel
    optimizer: Optimizer


def make_roles(backbone: Backbone, setting: Setting) -> Roles:
    """Fresh adapters: the policy is a copy of the reference, as both change nothing yet."""
    cfg, runtime = setting.ppo, setting.runtime
    for name in ("sft", "reward", "policy"):
        backbone.add_adapter(name, setting.lora)
    with torch.no_grad():
        for mine, theirs in zip(*map(backbone.adapter_parameters, ("policy", "sft")), strict=True):
            mine.copy_(theirs)
    policy = Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, _critic(backbone))
    return Roles(
        policy,
        Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk),
        RewardModel(backbone, "reward", reward_head(backbone.hidden_size).requires_grad_(False).to(backbone.device)),
        optimizer_for(policy, cfg),
    )


def _critic(backbone: Backbone) -> ScalarHead:
    return ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device)


@dataclass
class Stopwatch:
    """Seconds of each iteration and of its three beats. `synchronize` waits for a GPU before the time is taken."""

    synchronize: Callable[[], Any] = lambda: None
    seconds: list[dict[str, float]] = field(default_factory=list)
    _beats: dict[str, float] = field(default_factory=dict)
    _begun: float = 0.0

    def now(self) -> float:
        """The device having finished."""
        self.synchronize()
        return time.perf_counter()

    def watch(self, done: int) -> None:
        """`train_online` says before the first iteration, and after each, how many are done."""
        now = self.now()
        if done:
            self.seconds.append({"iteration": now - self._begun, **self._beats})
        self._begun, self._beats = now, {}

    @contextlib.contextmanager
    def at_beats(self) -> Iterator[None]:
        """The loop has no seam between its beats, nor needs one: here alone they are wrapped from outside, as the peer's are."""
        beats = {"rollout": "generate", "evaluate": "evaluate", "update": "update"}
        originals = {function: getattr(online, function) for function in beats.values()}
        try:
            for beat, function in beats.items():
                setattr(online, function, self._timed(beat, originals[function]))
            yield
        finally:
            for function, original in originals.items():
                setattr(online, function, original)

    def _timed(self, beat: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keys: Any) -> Any:
            started = self.now()
            result = function(*arguments, **keys)
            self._beats[beat] = self.now() - started
            return result

        return timed


def sampling_of(setting: Setting, response: int, stop_ids: tuple[int, ...] = NO_STOP) -> Sampling:
    """Answers of exactly `response` tokens, or of at most so many where something stops them."""
    runtime = setting.runtime
    return Sampling(
        response,
        stop_ids,
        runtime.rollout_chunk,
        seed=0,
        weights=setting.ppo.sampling_weights,
        decoder=runtime.decoder,
        cuda_graphs=runtime.cuda_graphs,
    )


def asked(work: Work) -> list[list[Prompt]]:
    """The prompts of each iteration, warm-up included."""
    return [
        [Prompt(row, (), ids) for row, ids in enumerate(prompt_ids(work, iteration))]
        for iteration in range(work.warmup + work.iterations)
    ]


def train(
    roles: Roles,
    setting: Setting,
    work: Work,
    stopwatch: Stopwatch,
    watch: Callable[[int], None] = lambda _: None,
) -> None:
    """The real loop over the work. Every answer must have its length, and every planned optimizer step be taken."""
    cfg = setting.ppo

    def check(_: int, figures: dict[str, float], experience: Experience) -> None:
        assert experience.response_lengths_B.unique().tolist() == [work.response], "an answer stopped early"
        assert figures["update_steps"] == cfg.epochs * cfg.rollout_size / cfg.minibatch_size, "a step was left out"

    def watched(done: int) -> None:
        stopwatch.watch(done)
        watch(done)

    with stopwatch.at_beats():
        train_online(
            roles.policy,
            roles.reference,
            lambda rollout: roles.reward_model.score_minibatches(
                rollout, END_ID, microbatch(setting.runtime), cfg.minibatch_size
            ),
            asked(work),
            roles.optimizer,
            algorithm_of(cfg),
            cfg,
            sampling_of(setting, work.response),
            microbatch(setting.runtime),
            check,
            watched,
        )
