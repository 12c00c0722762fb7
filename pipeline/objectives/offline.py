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
