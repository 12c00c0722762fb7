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
    margin: float = param("the chosen answer is to score this much above the rejected one", 0.0, ge=0)
    label_smoothing: float = param(
        "how often annotators are taken to have mixed up chosen and rejected; bounds the gap that training asks for",
        0.0,
        ge=0,
        lt=0.5,
        usual=(0.0, 0.2),
        why="that is how often people disagree over a clear pair; more leaves little to learn",
    )
