"""Did it get better? One sentence, from what the evaluation measured on the held-out prompts."""

from collections.abc import Mapping
from typing import Any

NAMES = {"policy": "the policy", "dpo": "DPO's policy"}
EVEN = 0.5  # what a model that is no better than SFT wins


def verdict(metrics: Mapping[str, Any], trained: str) -> str:
    """What metrics/evaluate*.json says of its sampled answers: who wins under the judge, at what KL, with what length.

    The judge, which training never saw, decides. A win rate counts where its 95% interval leaves one half out.
    """
    ours, sft = metrics["sampled"][trained], metrics["sampled"]["sft"]
    judge, reward = ours["win_rate_judge"], ours["win_rate_reward"]
    name = NAMES[trained]
    if judge["low"] > EVEN:
        said = f"{name} is better than the SFT model: the judge prefers its answer on {_interval(judge)} of the prompts"
        if ours["win_rate_judge_length_controlled"]["low"] <= EVEN:
            said += ", though at equal length no difference is shown"
    elif judge["high"] < EVEN:
        said = f"{name} is worse than the SFT model: the judge prefers its answer on only {_interval(judge)} of the prompts"
    else:
        said = f"no difference from the SFT model is shown: the judge prefers {name}'s answer on {_interval(judge)} of the prompts"
    if reward["low"] > EVEN and judge["low"] <= EVEN:
        said += (
            f", while the reward that it was trained on says {_interval(reward)}, as where a reward model is exploited"
        )
    before, after = f"{sft['length_median']:.0f}", f"{ours['length_median']:.0f}"
    lengths = f"went from {before} to {after}" if before != after else f"is still {after}"
    said += f"; it is {ours['kl_per_sequence_k1']:z.1f} nats per answer away, and the median length {lengths} tokens."
    return said[0].upper() + said[1:]


def mood(metrics: Mapping[str, Any], trained: str) -> str:
    """`better`, `worse` or `even`: what the sentence says, for its colour."""
    judge = metrics["sampled"][trained]["win_rate_judge"]
    return "better" if judge["low"] > EVEN else "worse" if judge["high"] < EVEN else "even"


def _interval(rate: Mapping[str, float]) -> str:
    return f"{rate['mean']:.0%} ({rate['low']:.0%} to {rate['high']:.0%})"
