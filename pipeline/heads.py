"""The scalar head of critics and reward models."""

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """hidden -> one number, in float32 whatever the base's precision; never quantised."""

    def __init__(self, hidden_size: int, std: float):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.normal_(self.linear.weight, std=std) if std else nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...]."""
        return self.linear(hidden.float()).squeeze(-1)


def reward_head(hidden_size: int) -> ScalarHead:
    """A reward model's head before training: std 1 / sqrt(H + 1), so that scores start near 1 (Stiennon et al. 2020, B.1)."""
    return ScalarHead(hidden_size, std=(hidden_size + 1) ** -0.5)
