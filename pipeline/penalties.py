"""Penalties on what an answer looks like, whatever it says: pure functions, 0 at best.

Axes: B answers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.statistics import distinct_n


def length_penalty(lengths_B: Tensor, target: int) -> Tensor:
    """-max(0, tokens - target): minus the tokens beyond the target; float32, [B].

    Args:
        lengths_B: tokens of each answer, the end token included.
        target: so many cost nothing. Lengths (10, 12, 15) at target 12 give (0, 0, -3).
    """
    return -(lengths_B - target).clamp(min=0).float()


def repetition_penalty(answers: Sequence[Sequence[int]], n: int) -> Tensor:
    """-(1 - different n-grams / all n-grams): minus the share of n-grams that the answer has said before; float32, [B].

    0 where no n-gram comes twice or the answer has none; near -1 where one n-gram is all there is. It is the repetition
    penalty of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", as one number for the whole answer.

    Args:
        answers: token ids without the end token. (1, 2, 1, 2, 1) has the pairs 12, 21, 12, 21: half of them are repeated.
    """
    repeated = [1 - distinct_n([answer], n) if len(answer) >= n else 0.0 for answer in answers]
    return -torch.tensor(repeated, dtype=torch.float32)
