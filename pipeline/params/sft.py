"""Section `sft`: supervised fine-tuning."""

from pipeline.params.training import TrainingParams


class SFTParams(TrainingParams):
    """Section `sft`. The learning rate falls to a tenth along a cosine."""
