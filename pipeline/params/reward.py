"""Sections `reward` and `judge`: a scalar head and an adapter trained on preference pairs."""

from typing import Literal

from pydantic import field_validator

from pipeline.params.section import param, refuse_without_revision
from pipeline.params.training import TrainingParams


class RewardParams(TrainingParams):
    """Sections `reward` and `judge`. Both learning rates fall to a tenth along a cosine."""

    from_: str | None = param(
        "a model of your own instead of training one: a PEFT folder with a scalar head, or a sequence-classification model "
        "with its own tokenizer; hf://org/name@revision is either; null trains",
        None,
        alias="from",
    )
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

    @field_validator("from_")
    @classmethod
    def _hub_model_is_pinned(cls, spec: str | None) -> str | None:
        return refuse_without_revision(spec)
