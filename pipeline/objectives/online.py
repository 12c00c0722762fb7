"""Objectives on sampled answers.

Axes: B batch, R response tokens. True in a mask = counts, the end token included. Everything "old" is from before the
update and has no gradient.
"""

import torch
from torch import Tensor

from pipeline.objectives.kl import k3
from pipeline.objectives.terms import Terms
from pipeline.tensors import masked_sum, safe_exp


def policy_gradient(
    logprobs_BR: Tensor, advantages_BR: Tensor, mask_BR: Tensor, weights_BR: Tensor | None = None
) -> Terms:
    """Sum over tokens of -A log p: its gradient is REINFORCE's (Williams 1992).

    Args:
        weights_BR: factor on each token's term, without gradient; None for ones.
    """
    terms_BR = -advantages_BR * logprobs_BR
    if weights_BR is not None:
        terms_BR = terms_BR * weights_BR
    loss_sum = masked_sum(terms_BR, mask_BR)
    return Terms(loss_sum, {"policy_loss": loss_sum.detach()})


def clipped_surrogate(
    logprobs_BR: Tensor,
    old_logprobs_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip: float,
    weights_BR: Tensor | None = None,
    dual_clip: float | None = None,
) -> Terms:
    """Sum over tokens of max(-A r, -A clip(r, 1 - clip, 1 + clip)) (Schulman et al. 2017, equation 7).

    Args:
        weights_BR: factor on each token's term, without gradient; None for ones.
        dual_clip: for A < 0 a term is at most -dual_clip * A (Ye et al. 2020); None for off.

    Returns:
        sums: clip_fraction (tokens where the clipped branch is the larger), update_k3 (k3 between old and new policy).
        maxima: ratio_max, log_ratio_max (largest |log ratio|).
    """
    log_ratio_BR = torch.where(mask_BR, logprobs_BR - old_logprobs_BR, 0)
    ratio_BR = safe_exp(log_ratio_BR)
    plain_BR = -advantages_BR * ratio_BR
    clipped_BR = -advantages_BR * ratio_BR.clamp(1 - clip, 1 + clip)
    terms_BR = torch.maximum(plain_BR, clipped_BR)
    if dual_clip is not None:
        limit_BR = -dual_clip * advantages_BR
        terms_BR = torch.where(advantages_BR < 0, torch.minimum(terms_BR, limit_BR), terms_BR)
    if weights_BR is not None:
        terms_BR = terms_BR * weights_BR
    loss_sum = masked_sum(terms_BR, mask_BR)
    with torch.no_grad():
        sums = {
            "policy_loss": loss_sum.detach(),
            "clip_fraction": masked_sum((clipped_BR > plain_BR).float(), mask_BR),
            "update_k3": masked_sum(k3(-log_ratio_BR), mask_BR),
        }
        maxima = {"ratio_max": torch.where(mask_BR, ratio_BR, 0).max(), "log_ratio_max": log_ratio_BR.abs().max()}
    return Terms(loss_sum, sums, maxima)


def clipped_value(values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor, clip: float) -> Terms:
    """Sum over tokens of 0.5 max((v - R)^2, (clip(v, v_old -+ clip) - R)^2), against returns."""
    clipped_BR = old_values_BR + (values_BR - old_values_BR).clamp(-clip, clip)
    plain_error_BR = (values_BR - returns_BR) ** 2
    clipped_error_BR = (clipped_BR - returns_BR) ** 2
    loss_sum = 0.5 * masked_sum(torch.maximum(plain_error_BR, clipped_error_BR), mask_BR)
    with torch.no_grad():
        clipped = masked_sum((clipped_error_BR > plain_error_BR).float(), mask_BR)
    return Terms(loss_sum, {"value_loss": loss_sum.detach(), "value_clip_fraction": clipped})


def ppo(policy: Terms, value: Terms, vf_coef: float) -> Terms:
    """Policy and value loss together, for one backward through the shared backbone."""
    loss_sum = policy.loss_sum + vf_coef * value.loss_sum
    return Terms(loss_sum, {"loss": loss_sum.detach(), **policy.sums, **value.sums}, policy.maxima | value.maxima)


def critic_alone(value: Terms) -> Terms:
    """The value loss without a policy, for the critic's warm-up."""
    return Terms(value.loss_sum, {"loss": value.loss_sum.detach(), **value.sums})
