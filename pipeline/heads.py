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
