"""Before the loop: the losses that made sft and the reward model, on numbers made up for the purpose."""

import math

import torch

from pipeline.diagnosis.compare import ARITHMETIC, Beat, compare
from pipeline.objectives import offline
from pipeline.params.reward import RewardParams

MODULE = "pipeline/objectives/offline.py"


def check_offline(reward: RewardParams) -> list[Beat]:
    """Each loss with its slopes: a term's sign cannot hide in a sum."""
    generator = torch.Generator().manual_seed(3)
    return [_sft(generator), _pairs(generator, reward)]


def _sft(generator: torch.Generator) -> Beat:
    """The negative log-likelihood: every trained token has slope -1, padding none."""
    logprobs_BR = (-torch.rand(3, 5, generator=generator)).requires_grad_()
    lengths = [5, 1, 3]
    mask_BR = torch.tensor([[t < length for t in range(5)] for length in lengths])
    loss = offline.sft(logprobs_BR, mask_BR).loss_sum
    loss.backward()
    right = -sum(float(logprobs_BR.detach()[row, t]) for row, length in enumerate(lengths) for t in range(length))
    slopes = [[-1.0 if t < length else 0.0 for t in range(5)] for length in lengths]
    found = [*logprobs_BR.grad.tolist(), [float(loss.detach())]]
    return compare("before: sft loss", MODULE, found, [*slopes, [right]], ARITHMETIC, ("row", "slope"))


def _pairs(generator: torch.Generator, cfg: RewardParams) -> Beat:
    """Bradley and Terry 1952: -log sigmoid(chosen - rejected - margin), labels smoothed."""
    chosen_B = (3 * torch.randn(6, generator=generator)).requires_grad_()
    rejected_B = (3 * torch.randn(6, generator=generator)).requires_grad_()
    loss = offline.bradley_terry(chosen_B, rejected_B, cfg.margin, cfg.label_smoothing).loss_sum
    loss.backward()
    right, slopes = 0.0, []
    for chosen, rejected in zip(chosen_B.tolist(), rejected_B.tolist(), strict=True):
        sure = 1 / (1 + math.exp(-(chosen - rejected - cfg.margin)))
        e = cfg.label_smoothing
        right += -(1 - e) * math.log(sure) - e * math.log(1 - sure)
        slopes.append(-(1 - e) * (1 - sure) + e * sure)
    found = [chosen_B.grad.tolist(), rejected_B.grad.tolist(), [float(loss.detach())]]
    expected = [slopes, [-slope for slope in slopes], [right]]
    return compare("before: pair loss", MODULE, found, expected, ARITHMETIC, ("chosen or rejected", "slope of pair"))
