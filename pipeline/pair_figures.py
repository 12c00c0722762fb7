"""What a reward model makes of pairs: gaps, calibration, accuracy by length.

Axes: B pairs.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.baselines import rivals
from pipeline.batch import Pairs
from pipeline.classifier import Scorer
from pipeline.data.records import Pair
from pipeline.statistics import accuracy_by_length, calibration, wins


def gaps(model: Scorer, pairs: Pairs, microbatch_tokens: int) -> Tensor:
    """Score of the chosen less that of the rejected answer, without gradient; [B]."""
    return model.score_all(pairs.chosen, microbatch_tokens) - model.score_all(pairs.rejected, microbatch_tokens)


def pair_figures(gaps_B: Tensor, pairs: Pairs) -> dict[str, Any]:
    """How far a reward model's confidence can be believed, and how right it is by length of the answers."""
    extra_B = pairs.chosen.response_lengths_B - pairs.rejected.response_lengths_B
    longer_B = torch.maximum(pairs.chosen.response_lengths_B, pairs.rejected.response_lengths_B)
    return calibration(gaps_B) | {"by_length": accuracy_by_length(gaps_B, extra_B, longer_B)}


def development_figures(gaps_B: Tensor, trained_on: list[Pair], batch: Pairs, pairs: list[Pair]) -> dict[str, Any]:
    """What a reward model makes of the development pairs, beside what length alone and a bag of words make of them.

    batch, pairs: the same pairs as ids and as they were. trained_on: what its rivals are fitted on.
    """
    found = {"accuracy": float(wins(gaps_B, torch.zeros_like(gaps_B)).mean())}
    found |= {f"accuracy_{rival}": float(right_B.mean()) for rival, right_B in rivals(trained_on, pairs).items()}
    found |= pair_figures(gaps_B, batch)
    found |= {"gap": float(gaps_B.mean()), "pairs": len(batch)}
    return {f"development_{name}": value for name, value in found.items()}
