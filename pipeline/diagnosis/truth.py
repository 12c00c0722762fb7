"""What the beats are held against: the artifacts as their files have them, and passes over whole answers."""

from dataclasses import dataclass
from pathlib import Path

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

SFT, REWARD = Path("artifacts/sft"), Path("artifacts/reward")
Rows = list[tuple[list[int], list[int]]]
"""(prompt ids, answer ids)."""


@dataclass(frozen=True)
class Truth:
    """The frozen weights, read from their files by another way than the pipeline's.

    reward, reward_head: None where no term of `ppo.reward` asks for the reward model.
    """

    causal: nn.Module
    sft: Adapter
    reward: Adapter | None
    reward_head: Head | None

    @property
    def scale(self) -> float:
        """alpha / r, the same for every adapter of a run."""
        return next(iter(self.sft.values())).scale

    @torch.no_grad()
    def passes(self, adapter: Adapter | None, rows: Rows, temperature: float) -> list[RowPass]:
        """`answer_pass` over rows."""
        return [answer_pass(self.causal, adapter, prompt, answer, temperature) for prompt, answer in rows]


def read_truth(causal: nn.Module, uses_reward_model: bool) -> Truth:
    """From artifacts/sft and artifacts/reward."""
    device = next(causal.parameters()).device
    sft = saved_adapter(SFT, device)
    if not uses_reward_model:
        return Truth(causal, sft, None, None)
    return Truth(causal, sft, saved_adapter(REWARD, device), saved_head(REWARD, device))
