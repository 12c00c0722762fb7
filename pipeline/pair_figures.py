"""What a reward model makes of pairs: gaps, calibration, accuracy by length.

Axes: B pairs.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.batch import Pairs
from pipeline.roles import RewardModel
from pipeline.statistics import accuracy_by_length, calibration


def gaps(model: RewardModel, pairs: Pairs, microbatch_tokens: int) -> Tensor:
    """Score of the chosen less that of the rejected answer, without gradient; [B]."""
    return model.score_all(pairs.chosen, microbatch_tokens) - model.score_all(pairs.rejected, microbatch_tokens)


def pair_figures(gaps_B: Tensor, pairs: Pairs) -> dict[str, Any]:
    """How far a reward model's confidence can be believed, and how right it is by length of the answers."""
    extra_B = pairs.chosen.response_lengths_B - pairs.rejected.response_lengths_B
    longer_B = torch.maximum(pairs.chosen.response_lengths_B, pairs.rejected.response_lengths_B)
    return calibration(gaps_B) | {"by_length": accuracy_by_length(gaps_B, extra_B, longer_B)}
