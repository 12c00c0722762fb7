"""Reward models: scores that no padding moves, and a head that is what it says. Saving and loading: test_backbone.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.backbone import Backbone
from pipeline.data.examples import sequences
from pipeline.heads import ScalarHead, reward_head
from pipeline.roles import RewardModel
from pipeline.weights import load_head, save_head

ROWS = sequences([([5, 6, 7], [8, 2]), ([10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 2])])


def test_a_base_without_a_padding_token_scores_unequal_lengths(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    """Reports shibing624/MedicalGPT#417 and huggingface/trl#2778: two rows of unequal length, before and after saving, and
    a row's score does not depend on its neighbour. Masks come from lengths; no padding id is asked for."""
    overrides = {"pad_token_id": None}
    backbone = make_backbone(adapters=("reward",), overrides=overrides)
    assert backbone.causal.config.pad_token_id is None
    head = ScalarHead(backbone.hidden_size, std=0.1)
    model = RewardModel(backbone, "reward", head)
    together_B = model.score_all(ROWS, 100)
    torch.testing.assert_close(
        together_B, torch.cat([model.score_all(row, 1) for row in ROWS.split(1)]), atol=1e-4, rtol=0
    )
    backbone.save_adapter("reward", tmp_path)
    save_head(head, tmp_path)
    again = make_backbone(adapters=(), overrides=overrides)
    again.load_adapter("reward", tmp_path)
    loaded = load_head(tmp_path, again.hidden_size, again.device)
    assert torch.equal(RewardModel(again, "reward", loaded).score_all(ROWS, 100), together_B)


def test_padding_never_moves_a_score_in_bfloat16_by_more_than_its_rounding(
    make_backbone: Callable[..., Backbone],
) -> None:
    """Report huggingface/trl#2778, in the precision that people train in: 8 bits of mantissa on scores near 1."""
    backbone = make_backbone(adapters=("reward",), dtype="bfloat16")
    model = RewardModel(backbone, "reward", ScalarHead(backbone.hidden_size, std=0.1))
    alone_B = torch.cat([model.score_all(row, 1) for row in ROWS.split(1)])
    torch.testing.assert_close(model.score_all(ROWS, 100), alone_B, atol=3e-2, rtol=0)


def test_the_head_is_a_float32_linear_that_is_trained(make_backbone: Callable[..., Backbone]) -> None:
    """Report unslothai/unsloth#5027: on a 4-bit base too. Its spread is 1 / sqrt(H + 1), so that scores start near 1."""
    backbone = make_backbone(adapters=("reward",), quantization="nf4")
    torch.manual_seed(1)
    head = reward_head(4095)
    assert type(head.linear) is torch.nn.Linear and head.linear.weight.dtype == torch.float32
    assert float(head.linear.weight.detach().std()) == pytest.approx(1 / 64, rel=0.05)
    assert head.linear.bias.tolist() == [0.0]
    head = reward_head(backbone.hidden_size)
    with backbone.training(dropout=False):
        RewardModel(backbone, "reward", head).score(ROWS).sum().backward()
    assert float(head.linear.weight.grad.abs().min()) > 0
