"""Rungs 2 to 4: a few iterations of the real loop under other settings, on the same prompts; does the score rise?

Axes: B answers, R response tokens, S iterations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.algorithms import algorithm_of
from pipeline.batch import Experience
from pipeline.diagnosis.opening import Case
from pipeline.errors import TrainingError
from pipeline.online import optimizer_for
from pipeline.params.ppo import PPOParams

SIGNIFICANT = 2.0  # standard errors
MOST_CLIPPED = 0.4  # share of tokens outside the clip: more, and most of the update is thrown away
MOST_SKIPPED = 0.5  # share of optimizer steps that stop_kl leaves out
FAR = 25.0  # nats per answer after a few iterations: text that no SFT model writes


@dataclass(frozen=True)
class ShortRun:
    """A few iterations, from the SFT model on.

    cfg: what it was run with.
    scores: mean of each iteration.
    rise, error: of a straight line through the scores of the answers to each prompt over the run: its mean rise, and the
        standard error of that.
    gain: mean over tokens of advantage times what the first update added to the log-probability; above 0, the update
        makes better answers likelier.
    moved: the largest change of any weight of the policy.
    stopped: why the run did not come to its end, "" where it did.
    """

    cfg: PPOParams
    scores: list[float]
    stats: list[dict[str, float]]
    rise: float
    error: float
    gain: float
    moved: float
    stopped: str

    @property
    def rises(self) -> bool:
        """By more than chance."""
        return self.rise > SIGNIFICANT * self.error

    @property
    def falls(self) -> bool:
        """By more than chance."""
        return self.rise < -SIGNIFICANT * self.error

    @property
    def kl(self) -> float:
        """To the SFT model in the last iteration, nats per answer; by k3, which never is below 0."""
        return self.stats[-1]["kl_per_token_k3"] * self.stats[-1]["length_mean"] if self.stats else math.nan

    @property
    def steps(self) -> float:
        """Optimizer steps taken."""
        return sum(one["update_steps"] for one in self.stats)

    @property
    def trouble(self) -> str:
        """What shows that steps are too large; "" where nothing does."""
        if self.stopped:
            return self.stopped
        skipped = sum(one["update_steps_skipped"] for one in self.stats)
        if skipped >= MOST_SKIPPED * (skipped + self.steps):
            return f"stop_kl left out {skipped:.0f} of {skipped + self.steps:.0f} optimizer steps"
        clipped = max(one.get("clip_fraction", 0.0) for one in self.stats)
        if clipped > MOST_CLIPPED:
            return f"in one update {clipped:.0%} of the tokens were clipped"
        if self.kl > FAR:
            return f"KL came to {self.kl:.0f} nats per answer in {len(self.stats)} iterations"
        return ""

    def summary(self) -> str:
        """What was found, in a few lines."""
        if self.stopped:
            return self.stopped
        line = f"score {self.scores[0]:.2f} to {self.scores[-1]:.2f}: {self.rise:+.2f}, standard error {self.error:.2f}"
        return f"{line}; KL {self.kl:.2g} nats"


def short_run(case: Case, cfg: PPOParams, iterations: int, tick: Callable[[], None]) -> ShortRun:
    """`iterations` rollouts and updates over the same prompts, from the SFT model on, without warm-up of any kind.

    Args:
        cfg: `rollout_size` answers an iteration.
        tick: called after each.
    """
    loop = case.loop
    cfg = cfg.model_copy(update={"warmup_steps": 0, "critic_warmup": 0})
    prompts = case.questions[: cfg.prompts_per_iteration]
    scores_SB: list[Tensor] = []
    stats: list[dict[str, float]] = []
    gains: list[float] = []

    def log(step: int, found: dict[str, float], experience: Experience) -> None:
        if step == 0:
            gains.append(_gain(case, experience))
        scores_SB.append(experience.scores_B.double())
        stats.append(found)
        tick()

    case.restart()
    before = _weights(case)
    stopped = ""
    try:
        changed = replace(loop, algorithm=algorithm_of(cfg))
        changed.train(cfg, [prompts] * iterations, optimizer_for(loop.policy, cfg), log, lambda _: None)
    except TrainingError as error:
        stopped = str(error)
    moved = max(float((now - then).abs().max()) for now, then in zip(_weights(case), before, strict=True))
    rise, error = trend(scores_SB, cfg.answers_per_prompt)
    means = [float(scores_B.mean()) for scores_B in scores_SB]
    return ShortRun(cfg, means, stats, rise, error, gains[0] if gains else math.nan, moved, stopped)


def trend(scores_SB: list[Tensor], answers_per_prompt: int) -> tuple[float, float]:
    """Of a straight line through each prompt's scores: its rise over the whole run, mean over prompts, and the standard error.

    Prompts differ far more than iterations do; what a prompt adds to all its scores is left out by this.
    """
    if len(scores_SB) < 2:
        return 0.0, math.inf
    scores_SP = torch.stack(scores_SB).view(len(scores_SB), -1, answers_per_prompt).mean(-1)
    times_S = torch.arange(len(scores_SP), dtype=torch.float64) - (len(scores_SP) - 1) / 2
    rise_P = times_S @ scores_SP / (times_S**2).sum() * (len(scores_SP) - 1)
    return float(rise_P.mean()), float(rise_P.std() / math.sqrt(len(rise_P)))


def _gain(case: Case, experience: Experience) -> float:
    mask_BR = experience.response_mask_BR
    now_BR = case.loop.policy.logprobs_all(experience, case.loop.microbatch_tokens)
    return float((experience.advantages_BR * (now_BR - experience.old_logprobs_BR))[mask_BR].mean())


def _weights(case: Case) -> list[Tensor]:
    parameters = case.loop.policy.backbone.adapter_parameters("policy")
    return [parameter.detach().float().clone() for parameter in parameters]
