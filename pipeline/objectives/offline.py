"""Objectives on given answers.

Axes: B batch, R response tokens. True in a mask = counts, the end token included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.objectives.terms import Terms
from pipeline.tensors import masked_sum


def sft(logprobs_BR: Tensor, mask_BR: Tensor) -> Terms:
    """Negative log-likelihood, summed over response tokens."""
    loss_sum = -masked_sum(logprobs_BR, mask_BR)
    return Terms(loss_sum, {"loss": loss_sum.detach()})


def bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margin: float = 0.0) -> Terms:
    """-log sigmoid(chosen - rejected - margin), summed over pairs, in float32 (Ouyang et al. 2022, equation 1).

    A tie counts as half right.
    """
    gap_B = chosen_B.float() - rejected_B.float()
    loss_sum = F.softplus(-(gap_B - margin)).sum()
    with torch.no_grad():
        right = (gap_B > 0).sum() + 0.5 * (gap_B == 0).sum()
    return Terms(loss_sum, {"loss": loss_sum.detach(), "accuracy": right, "gap": gap_B.detach().sum()})


def dpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Terms:
    """-log sigmoid(beta * gap of log-ratios), summed over pairs (Rafailov et al. 2023, equation 7).

    With label_smoothing e it is (1 - e) times that plus e times the loss of the swapped pair: conservative DPO
    (Mitchell 2023, "A note on DPO with noisy preferences").

    Args:
        chosen_B, rejected_B: the policy's log-probabilities of whole answers, in nats.
        ref_chosen_B, ref_rejected_B: the reference's, without gradient.

    Returns:
        sums: loss; reward_chosen and reward_rejected, the implicit rewards beta * (log-probability - the reference's);
        margin, their difference; accuracy, where a tie counts as half right; logprob_chosen and logprob_rejected. The
        margin often grows while logprob_chosen falls.
    """
    reward_chosen_B = beta * (chosen_B - ref_chosen_B)
    reward_rejected_B = beta * (rejected_B - ref_rejected_B)
    margin_B = reward_chosen_B - reward_rejected_B
    loss_sum = ((1 - label_smoothing) * F.softplus(-margin_B) + label_smoothing * F.softplus(margin_B)).sum()
    with torch.no_grad():
        sums = {
            "loss": loss_sum.detach(),
            "accuracy": (margin_B > 0).sum() + 0.5 * (margin_B == 0).sum(),
            "margin": margin_B.sum(),
            "reward_chosen": reward_chosen_B.sum(),
            "reward_rejected": reward_rejected_B.sum(),
            "logprob_chosen": chosen_B.sum(),
            "logprob_rejected": rejected_B.sum(),
        }
    return Terms(loss_sum, sums)
