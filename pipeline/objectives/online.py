"""Objectives on sampled answers.

Axes: B batch, R response tokens. True in a mask = counts, the end token included. Everything "old" is from before the
update and has no gradient.
"""

import torch
from torch import Tensor

from pipeline.objectives.kl import IN_LOSS, k3
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
        sums: clip_fraction (tokens where the clipped branch is the larger), and those of `movement`.
    """
    ratio_BR = safe_exp(torch.where(mask_BR, logprobs_BR - old_logprobs_BR, 0))
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
        clipped = masked_sum((clipped_BR > plain_BR).float(), mask_BR)
    moved = movement(logprobs_BR, old_logprobs_BR, mask_BR)
    return Terms(loss_sum, {"policy_loss": loss_sum.detach(), "clip_fraction": clipped, **moved.sums}, moved.maxima)


@torch.no_grad()
def movement(logprobs_BR: Tensor, old_logprobs_BR: Tensor, mask_BR: Tensor) -> Terms:
    """How far the update has moved the policy; no loss.

    Returns:
        sums: update_k3 (k3 between old and new policy).
        maxima: ratio_max, log_ratio_max (largest |log ratio|).
    """
    log_ratio_BR = torch.where(mask_BR, logprobs_BR - old_logprobs_BR, 0)
    ratio_BR = torch.where(mask_BR, safe_exp(log_ratio_BR), 0)
    maxima = {"ratio_max": ratio_BR.max(), "log_ratio_max": log_ratio_BR.abs().max()}
    return Terms(torch.zeros(()), {"update_k3": masked_sum(k3(-log_ratio_BR), mask_BR)}, maxima)


def kl_loss(
    logprobs_BR: Tensor, ref_logprobs_BR: Tensor, mask_BR: Tensor, estimator: str, weights_BR: Tensor | None = None
) -> Terms:
    """KL to the reference, summed over tokens, as something to minimise (`IN_LOSS` says which estimators may be).

    Args:
        weights_BR: factor on each token's term, without gradient; None for ones.
    """
    terms_BR = IN_LOSS[estimator](torch.where(mask_BR, logprobs_BR - ref_logprobs_BR, 0))
    if weights_BR is not None:
        terms_BR = terms_BR * weights_BR
    loss_sum = masked_sum(terms_BR, mask_BR)
    return Terms(loss_sum, {"kl_loss": loss_sum.detach()})


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
    return _total(policy.loss_sum + vf_coef * value.loss_sum, policy, value)


def actor_alone(policy: Terms, *figures: Terms) -> Terms:
    """The policy loss without a critic; of `figures` only the sums and maxima."""
    return _total(policy.loss_sum, policy, *figures)


def critic_alone(value: Terms) -> Terms:
    """The value loss without a policy, for the critic's warm-up."""
    return _total(value.loss_sum, value)


def with_kl(policy: Terms, kl: Terms, kl_coef: float) -> Terms:
    """A policy loss and `kl_loss` at a price per nat."""
    return _total(policy.loss_sum + kl_coef * kl.loss_sum, policy, kl)


def _total(loss_sum: Tensor, *parts: Terms) -> Terms:
    loss = {"loss": loss_sum.detach()}
    sums = {name: value for part in parts for name, value in part.sums.items()}
    maxima = {name: value for part in parts for name, value in part.maxima.items()}
    return Terms(loss_sum, loss | sums | loss, maxima)  # first in place, and not that of a part
