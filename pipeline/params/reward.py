"""Sections `reward` and `judge`: a scalar head and an adapter trained on preference pairs."""

from typing import Literal

from pipeline.params.section import param
from pipeline.params.training import TrainingParams


class RewardParams(TrainingParams):
    """Sections `reward` and `judge`. Both learning rates fall to a tenth along a cosine."""

    head_lr: float = param("peak learning rate of the scalar head", 1e-3, gt=0, le=1)
    cut_pairs: Literal["drop", "keep"] = param(
        "pairs with an answer cut by tokens.max_response: a reward model should see answers that end", "drop"
    )
