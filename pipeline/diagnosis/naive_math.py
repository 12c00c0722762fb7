"""The arithmetic of the loop a second time: rows as lists of floats, one token after the other, written from the papers.

Slow and obvious on purpose. Nothing of the pipeline is imported. Functions that make a loss also take scalar tensors of
torch, and are then differentiable; everything is float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Row = Sequence[float]
Scalar = float | Tensor

EXP_LIMIT = 20.0
WEIGHT_LIMIT = 2.0
WHITEN_EPS = 1e-8
ADAM_EPS = 1e-5


def exp(x: Scalar) -> Scalar:
    """exp, its argument clamped to -+20."""
    x = clipped(x, -EXP_LIMIT, EXP_LIMIT)
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def clipped(x: Scalar, low: float, high: float) -> Scalar:
    """x, at least `low` and at most `high`."""
    return max(min(x, high), low)


# --- KL and rewards ---


def kl(logprob: Scalar, other_logprob: float, estimator: str) -> Scalar:
    """One token's estimate of KL(policy || other): k1, k2 or k3 (Schulman, "Approximating KL divergence")."""
    log_ratio = logprob - other_logprob
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio * log_ratio / 2
    return exp(-log_ratio) - 1 + log_ratio


def shaped_score(score: float, truncated: bool, clip: float, missing_eos_penalty: float) -> float:
    """The score, clipped, less the penalty where the answer was cut."""
    return clipped(score, -clip, clip) - (missing_eos_penalty if truncated else 0.0)


def token_rewards(kls: Row, kl_coef: float, score: float) -> list[float]:
    """-kl_coef * kl at each token, and the score at the last one."""
    rewards = [-kl_coef * kl for kl in kls]
    rewards[-1] += score
    return rewards


def importance_weight(old: float, behaviour: float) -> float:
    """min(pi_old / pi_behaviour, 2) of one token."""
    return min(exp(old - behaviour), WEIGHT_LIMIT)


# --- advantages ---


def gae(rewards: Row, values: Row, gamma: float, lam: float) -> list[float]:
    """Generalised advantage estimation as Schulman et al. 2016 write it: sum over l of (gamma lam)^l delta_{t+l}; the last value is 0."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for later in range(t, len(rewards)):
            next_value = values[later + 1] if later + 1 < len(values) else 0.0
            delta = rewards[later] + gamma * next_value - values[later]
            total += (gamma * lam) ** (later - t) * delta
        advantages.append(total)
    return advantages


def whitened(rows: Sequence[Row]) -> list[list[float]]:
    """All tokens of all rows less their mean, over the square root of their population variance."""
    everything = [x for row in rows for x in row]
    mean = sum(everything) / len(everything)
    variance = sum((x - mean) ** 2 for x in everything) / len(everything)
    return [[(x - mean) / math.sqrt(variance + WHITEN_EPS) for x in row] for row in rows]


# --- losses ---


@dataclass(frozen=True)
class Token:
    """What the losses read of one token; `logprob` and `value` are the policy's now, the rest is from before the update."""

    logprob: Scalar
    value: Scalar
    old_logprob: float
    old_value: float
    advantage: float
    result: float
    weight: float


def surrogate(token: Token, clip: float, dual_clip: float | None) -> Scalar:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), to be made small; dual clip as Ye et al. 2020."""
    ratio = exp(token.logprob - token.old_logprob)
    term = max(-token.advantage * ratio, -token.advantage * clipped(ratio, 1 - clip, 1 + clip))
    if dual_clip is not None and token.advantage < 0:
        term = min(term, -dual_clip * token.advantage)
    return term * token.weight


def value_error(token: Token, clip: float) -> Scalar:
    """Half the larger squared error of the value and of the value clipped around the old one, against the return."""
    near = token.old_value + clipped(token.value - token.old_value, -clip, clip)
    return max((token.value - token.result) ** 2, (near - token.result) ** 2) / 2


def mean(tokens: Sequence[Token], term: Callable[[Token], Scalar]) -> Scalar:
    """The sum of a term over tokens, divided once by their number."""
    total: Scalar = 0.0
    for token in tokens:
        total = total + term(token)
    return total / len(tokens)


# --- the optimizer ---


def clip_factor(gradients: Sequence[Tensor], limit: float) -> float:
    """What gradients are multiplied by so that their common norm is at most `limit`."""
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients))
    return min(1.0, limit / (norm + 1e-6))


class Adam:
    """Kingma and Ba 2015, algorithm 1, without weight decay."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.steps = 0

    def step(self, gradients: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
        """What each parameter changes by."""
        self.steps += 1
        changes = {}
        for name, gradient in gradients.items():
            exact = gradient.double()
            self.first[name] = 0.9 * self.first.get(name, torch.zeros_like(exact)) + 0.1 * exact
            self.second[name] = 0.999 * self.second.get(name, torch.zeros_like(exact)) + 0.001 * exact**2
            first = self.first[name] / (1 - 0.9**self.steps)
            second = self.second[name] / (1 - 0.999**self.steps)
            changes[name] = -lr * first / (second.sqrt() + ADAM_EPS)
        return changes


def learning_rate(peak: float, warmup_steps: int, step: int) -> float:
    """A straight rise over the first steps, counted from 0, then constant."""
    return peak * min(1.0, (step + 1) / (warmup_steps + 1))
