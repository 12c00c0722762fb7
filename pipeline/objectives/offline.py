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


def bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margin: float = 0.0, label_smoothing: float = 0.0) -> Terms:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x) with x = chosen - rejected - margin, summed over pairs, in float32.

    Ouyang et al. 2022, equation 1; margin as in Touvron et al. 2023 (Llama 2), equation 2; the smoothing e = P(label is
    wrong) as in conservative DPO (Mitchell 2023). With e > 0 the loss is least at x = log((1 - e) / e), not at infinity.
    A tie counts as half right; accuracy knows no margin.
    """
    gap_B = chosen_B.float() - rejected_B.float()
    wanted_B = gap_B - margin
    loss_sum = ((1 - label_smoothing) * F.softplus(-wanted_B) + label_smoothing * F.softplus(wanted_B)).sum()
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
    """`bradley_terry` on implicit rewards, beta * (log-probability - the reference's) (Rafailov et al. 2023, equation 7).

    With label_smoothing it is conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences").

    Args:
        chosen_B, rejected_B: the policy's log-probabilities of whole answers, in nats.
        ref_chosen_B, ref_rejected_B: the reference's, without gradient.

    Returns:
        sums: loss; accuracy; reward_chosen and reward_rejected, the implicit rewards; margin, their difference;
        logprob_chosen and logprob_rejected, the policy's. The margin often grows while logprob_chosen falls.
    """
    reward_chosen_B = beta * (chosen_B - ref_chosen_B)
    reward_rejected_B = beta * (rejected_B - ref_rejected_B)
    terms = bradley_terry(reward_chosen_B, reward_rejected_B, label_smoothing=label_smoothing)
    implicit = {"reward_chosen": reward_chosen_B, "reward_rejected": reward_rejected_B}
    implicit |= {"logprob_chosen": chosen_B, "logprob_rejected": rejected_B}
    sums = {"loss": terms.sums["loss"], "accuracy": terms.sums["accuracy"], "margin": terms.sums["gap"]}
    return Terms(terms.loss_sum, sums | {name: values_B.detach().sum() for name, values_B in implicit.items()})
