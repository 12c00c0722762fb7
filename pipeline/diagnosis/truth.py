"""What the beats are held against: the artifacts as their files have them, and passes over whole answers."""

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.diagnosis.naive_model import (
    Adapter,
    Head,
    RowPass,
    answer_pass,
    saved_adapter,
    saved_head,
)
from pipeline.diagnosis.opening import REWARD, SFT

Rows = list[tuple[list[int], list[int]]]
"""(prompt ids, answer ids)."""


@dataclass(frozen=True)
class Truth:
    """The frozen weights, read from their files by another way than the pipeline's."""

    causal: nn.Module
    sft: Adapter
    reward: Adapter
    reward_head: Head

    @property
    def scale(self) -> float:
        """alpha / r, the same for every adapter of a run."""
        return next(iter(self.sft.values())).scale

    @torch.no_grad()
    def passes(self, adapter: Adapter | None, rows: Rows, temperature: float) -> list[RowPass]:
        """`answer_pass` over rows."""
        return [answer_pass(self.causal, adapter, prompt, answer, temperature) for prompt, answer in rows]


def read_truth(causal: nn.Module) -> Truth:
    """From artifacts/sft and artifacts/reward."""
    device = next(causal.parameters()).device
    return Truth(causal, saved_adapter(SFT, device), saved_adapter(REWARD, device), saved_head(REWARD, device))
