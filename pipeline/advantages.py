"""Advantage estimators: pure functions of rewards, values and masks.

Axes: B batch, R response tokens. True in a mask = counts, the end token included. Index t = token t; a value is that of
the state BEFORE token t.
"""

import torch
from torch import Tensor


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
