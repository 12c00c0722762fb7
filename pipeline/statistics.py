"""Rates with bootstrap intervals: wins, wins at equal length, accuracies; and how varied a text is.

Axes: B prompts or pairs, S samples of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

INTERVAL = (2.5, 97.5)  # percentiles of a 95% interval
NEWTON_STEPS = 30
CALIBRATION_BINS = 10
SIMILAR_LENGTH = 0.1  # of the longer answer


@dataclass(frozen=True)
class Rate:
    """A rate and the bounds of its 95% interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For a metrics file."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def wins(ours_B: Tensor, theirs_B: Tensor) -> np.ndarray:
    """1 where ours scores higher, 0 where theirs does, 0.5 for ties; float64, [B]."""
    return ((ours_B > theirs_B).double() + 0.5 * (ours_B == theirs_B).double()).numpy()


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], size: int, resamples: int, seed: int) -> Rate:
    """A statistic of `size` rows, with its percentile interval over rows drawn with replacement.

    `statistic` takes the numbers of the rows of S samples, [S, size], and gives one value for each sample, [S].
    """
    drawn = np.random.default_rng(seed).integers(0, size, (resamples, size))
    low, high = np.percentile(statistic(drawn), INTERVAL)
    return Rate(float(statistic(np.arange(size)[None])[0]), float(low), float(high))


def mean_rate(values_B: ArrayLike, resamples: int, seed: int) -> Rate:
    """The mean and its interval."""
    values = np.asarray(values_B, dtype=float)
    return bootstrap(lambda rows: values[rows].mean(1), len(values), resamples, seed)


def length_controlled_rate(wins_B: np.ndarray, extra_tokens_B: np.ndarray, resamples: int, seed: int) -> Rate:
    """The win rate that answers of equal length would have.

    A logistic regression of winning on tanh(length difference / its standard deviation), read where the difference is 0:
    the length term of AlpacaEval 2 (Dubois et al. 2024, section 3). A tie is half a win.

    Args:
        extra_tokens_B: length of our answer less that of theirs.
    """
    spread = extra_tokens_B.std()
    if spread == 0:
        return mean_rate(wins_B, resamples, seed)
    length_B = np.tanh(extra_tokens_B / spread)
    return bootstrap(lambda rows: _at_equal_length(wins_B[rows], length_B[rows]), len(wins_B), resamples, seed)


def _at_equal_length(wins_SB: np.ndarray, length_SB: np.ndarray) -> np.ndarray:
    """The fitted win rate at length difference 0 of each of S samples, by Newton's method; [S].

    A prior of variance 1 on the slope keeps it finite where length tells all. Thousands of fits of two parameters go
    through in one: a library that fits them one by one takes a hundred times as long.
    """
    intercept_S1 = np.zeros((len(wins_SB), 1))
    slope_S1 = np.zeros_like(intercept_S1)
    for _ in range(NEWTON_STEPS):
        fitted_SB = 1 / (1 + np.exp(-(intercept_S1 + slope_S1 * length_SB)))
        missed_SB, weight_SB = wins_SB - fitted_SB, fitted_SB * (1 - fitted_SB)
        toward_intercept = missed_SB.sum(1, keepdims=True)
        toward_slope = (missed_SB * length_SB).sum(1, keepdims=True) - slope_S1
        h_ii = weight_SB.sum(1, keepdims=True) + 1e-9
        h_is = (weight_SB * length_SB).sum(1, keepdims=True)
        h_ss = (weight_SB * length_SB**2).sum(1, keepdims=True) + 1
        determinant = h_ii * h_ss - h_is**2
        # at most 1 a step: Newton's full step may overshoot where almost all comparisons end alike
        intercept_S1 += np.clip((h_ss * toward_intercept - h_is * toward_slope) / determinant, -1, 1)
        slope_S1 += np.clip((h_ii * toward_slope - h_is * toward_intercept) / determinant, -1, 1)
    rate_S = 1 / (1 + np.exp(-intercept_S1[:, 0]))
    mean_S = wins_SB.mean(1)
    return np.where((mean_S == 0) | (mean_S == 1), mean_S, rate_S)  # where all end alike the intercept has no bound


def beside_baselines(gaps_B: Tensor, rivals: dict[str, np.ndarray], resamples: int, seed: int) -> dict[str, object]:
    """A reward model's accuracy on pairs and that of each rival on the same pairs, with intervals of rates and of differences.

    Args:
        gaps_B: score of the chosen less that of the rejected answer.
        rivals: per pair 1 where a rival is right, 0.5 where it cannot tell, 0 where it is wrong; [B].
    """
    right_B = wins(gaps_B, torch.zeros_like(gaps_B))
    result: dict[str, object] = {"pairs": len(right_B), "accuracy": mean_rate(right_B, resamples, seed).as_dict()}
    for name, rival_B in rivals.items():
        result[f"accuracy_{name}"] = mean_rate(rival_B, resamples, seed).as_dict()
        result[f"lead_over_{name}"] = mean_rate(right_B - rival_B, resamples, seed).as_dict()
    return result


def calibration(gaps_B: Tensor) -> dict[str, float]:
    """How far a reward model's confidence is from how often it is right.

    Its confidence in a pair is sigmoid(|gap|), the probability that Bradley and Terry give to the answer that it prefers;
    it lies between 0.5 and 1. The expected calibration error (Guo et al. 2017, equation 3) sorts pairs into 10 bins of
    equal width over that range, and is the mean over pairs of |accuracy - mean confidence| of their bin.
    A tie is half right.

    Args:
        gaps_B: score of the chosen less that of the rejected answer.

    Returns:
        ece; confidence, its mean.
    """
    confidence_B = torch.sigmoid(gaps_B.double().abs()).numpy()
    right_B = wins(gaps_B, torch.zeros_like(gaps_B))
    bins_B = np.minimum(((confidence_B - 0.5) * 2 * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    misses = np.bincount(bins_B, weights=right_B - confidence_B)  # per bin: pairs * (accuracy - mean confidence)
    return {"ece": float(np.abs(misses).sum() / len(right_B)), "confidence": float(confidence_B.mean())}


def accuracy_by_length(gaps_B: Tensor, extra_tokens_B: Tensor, longer_B: Tensor) -> dict[str, dict[str, float]]:
    """Accuracy where the chosen answer is shorter, of similar length, or longer, each with its number of pairs.

    A reward model that goes by length is right in one of the outer groups and wrong in the other. Similar: the answers
    differ by at most a tenth of the longer one. A group without pairs has no accuracy.

    Args:
        extra_tokens_B: length of the chosen answer less that of the rejected one.
        longer_B: length of the longer of the two.
    """
    right_B = wins(gaps_B, torch.zeros_like(gaps_B))
    similar_B = extra_tokens_B.abs() <= SIMILAR_LENGTH * longer_B
    groups = {
        "chosen_shorter": ~similar_B & (extra_tokens_B < 0),
        "similar": similar_B,
        "chosen_longer": ~similar_B & (extra_tokens_B > 0),
    }
    return {name: _accuracy(right_B[rows_B.numpy()]) for name, rows_B in groups.items()}


def _accuracy(right_B: np.ndarray) -> dict[str, float]:
    return {"pairs": len(right_B)} | ({"accuracy": float(right_B.mean())} if len(right_B) else {})


def distinct_n(answers: Sequence[Sequence[int]], n: int) -> float:
    """Share of different n-grams among all n-grams of the answers (Li et al. 2016); 0 where there is none."""
    grams = list(chain.from_iterable(zip(*(answer[start:] for start in range(n)), strict=False) for answer in answers))
    return len(set(grams)) / len(grams) if grams else 0.0
