"""Section `sft`: supervised fine-tuning."""

from pydantic import field_validator

from pipeline.params.section import param, refuse_without_revision
from pipeline.params.training import TrainingParams


class SFTParams(TrainingParams):
    """Section `sft`. The learning rate falls to a tenth along a cosine."""

    from_: str | None = param(
        "an adapter of your own, a PEFT folder or hf://org/name@revision, instead of training one; null trains",
        None,
        alias="from",
    )

    @field_validator("from_")
    @classmethod
    def _hub_model_is_pinned(cls, spec: str | None) -> str | None:
        return refuse_without_revision(spec)
