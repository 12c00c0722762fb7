"""Win rates with bootstrap intervals."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

INTERVAL = (2.5, 97.5)  # percentiles of a 95% interval


@dataclass(frozen=True)
class Rate:
    """A rate and the bounds of its 95% interval."""

    mean: float
    low: float
    high: float


def win_rate(ours_B: Tensor, theirs_B: Tensor, resamples: int, seed: int) -> Rate:
    """Share of prompts where our answer scores higher, ties one half; percentile bootstrap over prompts."""
    wins_B = ((ours_B > theirs_B).double() + 0.5 * (ours_B == theirs_B).double()).numpy()
    drawn = np.random.default_rng(seed).integers(0, len(wins_B), (resamples, len(wins_B)))
    low, high = np.percentile(wins_B[drawn].mean(1), INTERVAL)
    return Rate(float(wins_B.mean()), float(low), float(high))


def pair_accuracy(gaps_B: Tensor) -> float:
    """Share of pairs whose chosen answer scores higher, ties one half."""
    return float(((gaps_B > 0).float() + 0.5 * (gaps_B == 0).float()).mean())
