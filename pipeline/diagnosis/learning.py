"""Rungs 2 to 4: a few iterations of the real loop under other settings, always on the same prompts; did the score rise?

Axes: B prompts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.batch import Experience
from pipeline.diagnosis.opening import Loop
from pipeline.errors import TrainingError
from pipeline.params.ppo import PPOParams

RISE = 2.0  # standard errors
WIDE_CLIP = 10.0
TINY_LR = 1e-7
MOST_CLIPPED = 0.4  # share of tokens outside the clip: more, and most of the update is thrown away
MOST_SKIPPED = 0.5  # share of steps that stop_kl leaves out
FAR = 25.0  # nats per answer within a few iterations: text that no SFT model writes


@dataclass(frozen=True)
class ShortRun:
    """A few iterations from the SFT model on.

    scores: the mean score of each iteration.
    rise, error: how much the score rose over the run, a straight line through each prompt's scores, and its standard error.
    moved: the largest change of a weight of the policy, and the number of optimizer steps.
    stopped: why the run did not come to its end.
    """

    cfg: PPOParams
    scores: list[float]
    rise: float
    error: float
    stats: list[dict[str, float]]
    moved: float
    steps: int
    stopped: str = ""

    @property
    def rises(self) -> bool:
        """The score rises by more than chance."""
        return self.rise > RISE * self.error and not self.trouble

    @property
    def falls(self) -> bool:
        """The score falls by more than chance."""
        return self.rise < -RISE * self.error

    @property
    def kl(self) -> float:
        """To the SFT model, nats per answer, in the last iteration."""
        return self.stats[-1]["kl_per_sequence_k1"] if self.stats else math.nan

    @property
    def trouble(self) -> str:
        """What shows that steps are too large, "" where nothing does."""
        if self.stopped:
            return self.stopped
        clipped = max(one.get("clip_fraction", 0.0) for one in self.stats)
        skipped = sum(one["update_steps_skipped"] for one in self.stats)
        planned = skipped + sum(one["update_steps"] for one in self.stats)
        if skipped / planned >= MOST_SKIPPED:
            return f"stop_kl left out {skipped:.0f} of {planned:.0f} optimizer steps"
        if clipped > MOST_CLIPPED and self.cfg.clip < WIDE_CLIP:
            return f"{clipped:.0%} of the tokens were clipped in an update"
        if self.kl > FAR:
            return f"KL reached {self.kl:.0f} nats per answer in {len(self.stats)} iterations"
        return ""

    def summary(self) -> str:
        """One line."""
        if self.stopped:
            return self.stopped
        return (
            f"score {self.scores[0]:.2f} to {self.scores[-1]:.2f}: {self.rise:+.2f} (standard error {self.error:.2f}), "
            f"KL {self.kl:.2g}"
        )


def short_run(loop: Loop, cfg: PPOParams, iterations: int, tick: Callable[[], None]) -> ShortRun:
    """`iterations` over the first `rollout_size` prompts, without warm-up steps, from the SFT model on."""
    size = min(cfg.rollout_size, len(loop.questions))
    prompts = loop.questions[:size]
    cfg = cfg.model_copy(update={"warmup_steps": 0, "critic_warmup": 0, "rollout_size": size})
    scores_by_step: list[Tensor] = []
    stats: list[dict[str, float]] = []

    def log(_: int, found: dict[str, float], experience: Experience) -> None:
        scores_by_step.append(experience.scores_B.double())
        stats.append(found)
        tick()

    loop.restart()
    before = _policy(loop)
    stopped = ""
    try:
        loop.run(cfg, [prompts] * iterations, log)
    except TrainingError as error:
        stopped = str(error)
    moved = max(float((now - then).abs().max()) for now, then in zip(_policy(loop), before, strict=True))
    rise, error = _trend(scores_by_step)
    steps = int(sum(one["update_steps"] for one in stats))
    means = [float(scores_B.mean()) for scores_B in scores_by_step]
    return ShortRun(cfg, means, rise, error, stats, moved, steps, stopped)


def _trend(scores_by_step: list[Tensor]) -> tuple[float, float]:
    """Rise over the whole run of a straight line through each prompt's scores: the mean over prompts, and its standard error."""
    if len(scores_by_step) < 2:
        return 0.0, math.inf
    scores_SB = torch.stack(scores_by_step)
    count = len(scores_SB)
    steps_S = torch.arange(count, dtype=torch.float64) - (count - 1) / 2
    rise_B = (steps_S @ scores_SB) / (steps_S**2).sum() * (count - 1)
    return float(rise_B.mean()), float(rise_B.std() / math.sqrt(len(rise_B)))


def _policy(loop: Loop) -> list[Tensor]:
    return [parameter.detach().float().clone() for parameter in loop.policy.backbone.adapter_parameters("policy")]
