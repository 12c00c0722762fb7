"""Advantage estimators: pure functions of rewards, values and masks.

Axes: B batch, R response tokens, P prompts, G answers to one prompt. True in a mask = counts, the end token included.
Index t = token t; a value is that of the state BEFORE token t.
"""

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to a group's standard deviation before dividing by it
NO_SPREAD = 1e-8  # a group whose standard deviation is below has nothing to tell


def gae(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float, bootstrap_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16), over counting tokens only.

    The counting tokens of a row are its first ones. The value after the last token is 0, also where an answer was cut:
    in RLHF the score is a terminal reward. `bootstrap_B` puts another value there, for time-limited environments.

    Returns:
        advantages_BR, and returns_BR = advantages + values; both 0 at padding.
    """
    mask_BR = mask_BR.bool()
    advantages_BR = torch.zeros_like(rewards_BR)
    lengths_B = mask_BR.sum(1)
    next_value_B = torch.zeros_like(rewards_BR[:, 0]) if bootstrap_B is None else bootstrap_B.to(rewards_BR)
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(int(lengths_B.max()))):
        counts_B = mask_BR[:, t]
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        # torch.where, not a product: padding may hold anything, even NaN
        advantages_BR[:, t] = torch.where(counts_B, advantage_B, 0)
        next_advantage_B = torch.where(counts_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(counts_B, values_BR[:, t], next_value_B)
    return advantages_BR, torch.where(mask_BR, advantages_BR + values_BR, 0)


def reward_to_go(rewards_BR: Tensor, mask_BR: Tensor, gamma: float, bootstrap_B: Tensor | None = None) -> Tensor:
    """Discounted sum of the rewards of token t and all later ones; 0 at padding.

    It is `gae` without a critic: values 0, lambda 1. `bootstrap_B` is what is still to come after the last token.
    """
    return gae(rewards_BR, torch.zeros_like(rewards_BR), mask_BR, gamma, lam=1.0, bootstrap_B=bootstrap_B)[0]


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Each reward less the mean of the OTHER answers to its prompt (Kool et al. 2019; Ahmadian et al. 2024, RLOO).

    An answer without others gets 0.
    """
    answers = rewards_PG.shape[1]
    return group_centered(rewards_PG) * answers / max(answers - 1, 1)


def group_centered(rewards_PG: Tensor) -> Tensor:
    """Each reward less the mean of its group, its own included: GRPO without the standard deviation (Liu et al. 2025)."""
    exact_PG = rewards_PG.double()  # in which the mean of equal float32 numbers is that number
    return (exact_PG - exact_PG.mean(1, keepdim=True)).to(rewards_PG)


def group_normalized(rewards_PG: Tensor) -> Tensor:
    """(reward - mean) / (std + 1e-6) within each group, population std (Shao et al. 2024, GRPO, section 4.1.2).

    A group without spread, a single answer for one, gets 0: finite, and without effect.
    """
    centered_PG = group_centered(rewards_PG)
    std_P1 = centered_PG.square().mean(1, keepdim=True).sqrt()
    return torch.where(std_P1 < NO_SPREAD, 0, centered_PG / (std_P1 + STD_EPS))


def over_tokens(rewards_BR: Tensor, mask_BR: Tensor, group_size: int, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """`estimate` of whole answers' rewards, prompt by prompt, at each of their tokens; 0 at padding.

    Args:
        rewards_BR: 0 at padding; the answers to one prompt are neighbours.
        estimate: [P, G] -> [P, G].
    """
    # in float64: what the answers of a group have in common cancels, and dividing by a small spread would blow up the rest
    totals_PG = rewards_BR.double().sum(1).view(-1, group_size)
    return torch.where(mask_BR, estimate(totals_PG).view(-1, 1), 0).to(rewards_BR)
