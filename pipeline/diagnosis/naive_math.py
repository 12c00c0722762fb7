"""The arithmetic of the loop a second time: rows as lists of floats, one token after the other, written from the papers.

Slow and obvious on purpose. Nothing of the pipeline is imported. Functions that make a loss also take scalar tensors of
torch, and are then differentiable; everything is float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Row = Sequence[float]
Scalar = float | Tensor

EXP_LIMIT = 20.0
WEIGHT_LIMIT = 2.0
WHITEN_EPS = 1e-8
GROUP_EPS = 1e-6
NO_SPREAD = 1e-8
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
    """-kl_coef * kl at each token, and the score at the last one; nothing where there are no tokens."""
    rewards = [-kl_coef * kl for kl in kls]
    if rewards:
        rewards[-1] += score
    return rewards


def relative(scores: Row) -> list[float]:
    """Scores less their mean, over the square root of their population variance plus 1e-8."""
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / len(scores)
    return [(score - mean) / math.sqrt(variance + 1e-8) for score in scores]


def length_penalty(answer: Sequence[int], target: int) -> float:
    """Minus the tokens beyond the target."""
    return -float(max(0, len(answer) - target))


def repetition_penalty(words: Sequence[int], n: int) -> float:
    """Minus the share of n-grams that are not the first of their kind; `words` are the tokens without the end token."""
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return -(1 - len(set(grams)) / len(grams)) if grams else 0.0


def next_kl_coef(kl_coef: float, kl: float, target: float, answers: int, horizon: int) -> float:
    """The proportional controller of Ziegler et al. 2019, section 2.2."""
    return kl_coef * (1 + clipped(kl / target - 1, -0.2, 0.2) * answers / horizon)


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


def reward_to_go(rewards: Row, gamma: float) -> list[float]:
    """The discounted sum of the rewards of token t and all later ones (Sutton and Barto, equation 3.8)."""
    return [sum(gamma ** (later - t) * rewards[later] for later in range(t, len(rewards))) for t in range(len(rewards))]


def centred(rows: Sequence[Row]) -> list[list[float]]:
    """All tokens of all rows less their mean."""
    everything = [x for row in rows for x in row]
    mean = sum(everything) / len(everything)
    return [[x - mean for x in row] for row in rows]


def scaled(rows: Sequence[Row]) -> list[list[float]]:
    """All tokens of all rows over the root of their mean square."""
    everything = [x for row in rows for x in row]
    size = math.sqrt(sum(x * x for x in everything) / len(everything) + WHITEN_EPS)
    return [[x / size for x in row] for row in rows]


def leave_one_out(group: Row) -> list[float]:
    """Each reward less the mean of the others (Ahmadian et al. 2024, RLOO)."""
    return [own - (sum(group) - own) / (len(group) - 1) for own in group]


def group_relative(group: Row, by_std: bool) -> list[float]:
    """Each reward less the mean of its group, over its population deviation plus 1e-6 if asked (Shao et al. 2024, GRPO)."""
    mean = sum(group) / len(group)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
    if by_std:
        return [(reward - mean) / (deviation + GROUP_EPS) if deviation > NO_SPREAD else 0.0 for reward in group]
    return [reward - mean for reward in group]


def whitened(rows: Sequence[Row]) -> list[list[float]]:
    """All tokens of all rows less their mean, over the square root of their population variance."""
    return scaled(centred(rows))


# --- losses ---


@dataclass(frozen=True)
class Token:
    """What the losses read of one token; `logprob` and `value` are the policy's now, the rest is from before the update."""

    logprob: Scalar
    value: Scalar | None
    old_logprob: float
    old_value: float
    ref_logprob: float
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


def policy_gradient(token: Token) -> Scalar:
    """REINFORCE's term: -A log p (Williams 1992)."""
    return -token.advantage * token.logprob * token.weight


def kl_loss(token: Token, estimator: str) -> Scalar:
    """KL to the reference as something to make small."""
    return kl(token.logprob, token.ref_logprob, estimator) * token.weight


def value_error(token: Token, clip: float) -> Scalar:
    """Half the larger squared error of the value and of the value clipped around the old one, against the return."""
    near = token.old_value + clipped(token.value - token.old_value, -clip, clip)
    return max((token.value - token.result) ** 2, (near - token.result) ** 2) / 2


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
