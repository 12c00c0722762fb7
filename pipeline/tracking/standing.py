"""How a policy stands: what its run measured, and whether it beats the one that holds the title. Nothing of MLflow is known here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.statistics import Rate, mean_rate, wins

EVEN = 0.5


@dataclass(frozen=True)
class Standing:
    """What is registered beside a policy's weights.

    policy: SHA-256 of its folder; versions are told apart by it.
    court: of what judged it: judge, prompts, temperature. Scores of one court may be compared.
    scores: the judge's, of one sampled answer to each held-out prompt.
    against_sft: its win rate over the SFT model under the same judge.
    figures: for people.
    """

    policy: str
    court: str
    scores: tuple[float, ...]
    against_sft: Rate
    figures: Mapping[str, float]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Standing":
        """As a spool's entry holds it."""
        rate = Rate(**content["against_sft"])
        return cls(content["policy"], content["court"], tuple(content["scores"]), rate, content["figures"])


@dataclass(frozen=True)
class Ruling:
    """Whether a policy becomes champion, and why, for people."""

    champion: bool
    why: str


def ruling(
    ours: Standing, court: str | None, scores: tuple[float, ...], champion: str, resamples: int, seed: int
) -> Ruling:
    """Against the present champion's scores; a policy takes the title only if it wins outside the 95% interval.

    Args:
        court: what judged the champion; None where there is none, and the SFT model is the one to beat.
        champion: its name, for the sentence.
    """
    if court is None:
        rate = ours.against_sft
        return Ruling(rate.low > EVEN, f"there is no champion; over the SFT model it wins {_said(rate)}")
    if court != ours.court or len(scores) != len(ours.scores):
        return Ruling(False, f"not compared with {champion}, which another judge or other prompts have judged")
    won = wins(torch.tensor(ours.scores, dtype=torch.float64), torch.tensor(scores, dtype=torch.float64))
    rate = mean_rate(won, resamples, seed)
    return Ruling(rate.low > EVEN, f"over {champion} it wins {_said(rate)}")


def _said(rate: Rate) -> str:
    return f"{rate.mean:.0%} ({rate.low:.0%} to {rate.high:.0%}) by the judge"
