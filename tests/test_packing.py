"""Rows packed into one: loss and gradients are those of rows apart, and no row sees another."""

from collections.abc import Callable

import pytest
import torch
from worlds import FAMILIES, World, flat, ppo_params

from pipeline.backbone import Backbone
from pipeline.batch import Pairs, Sequences
from pipeline.data.examples import sequences
from pipeline.errors import BaseModelError
from pipeline.heads import ScalarHead
from pipeline.objectives.offline import bradley_terry, sft
from pipeline.roles import Policy, RewardModel
from pipeline.update import accumulate

ROWS = sequences([([5 + n] * (1 + 3 * n), [*range(40 + n, 43 + n), 2][n % 3 :]) for n in range(6)])
OTHERS = sequences([([5 + n] * (1 + 3 * n), [*range(90 + n, 92 + n), 2]) for n in range(6)])


def loss_and_gradient(backbone: Backbone, kind: str) -> tuple[float, torch.Tensor]:
    """Of all rows in one micro-batch, dropout off."""
    parameters = backbone.train("sft")
    torch.manual_seed(2)
    if kind == "sft":
        model, batch = Policy(backbone, "sft", 1.0, 16), ROWS
        objective = lambda output, rows: sft(output.logprobs_BR, rows.response_mask_BR)  # noqa: E731
    else:
        model, batch = RewardModel(backbone, "sft", ScalarHead(backbone.hidden_size, std=0.1)), Pairs(ROWS, OTHERS)
        objective = lambda scores, _: bradley_terry(*scores)  # noqa: E731
    with backbone.training(dropout=False):
        loss = accumulate(model, batch, objective, 10_000)["loss"]
    return loss, flat([parameter.grad for parameter in parameters])


@pytest.mark.parametrize("attention", ["recompute", "eager", "sdpa"])
@pytest.mark.parametrize("kind", ["sft", "reward"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_packed_is_unpacked(make_backbone: Callable[..., Backbone], family: str, kind: str, attention: str) -> None:
    """Report huggingface/trl#3067. Loss and gradient in float32; the columns that go through the model are real tokens alone."""
    apart = loss_and_gradient(make_backbone(family, attention=attention), kind)
    backbone = make_backbone(family, attention=attention, packing=True)
    seen: list[torch.Size] = []
    backbone.decoder.register_forward_pre_hook(
        lambda *given: seen.append(given[2]["input_ids"].shape), with_kwargs=True
    )
    packed = loss_and_gradient(backbone, kind)
    assert seen == [(1, int(rows.lengths_B.sum())) for rows in ((ROWS,) if kind == "sft" else (ROWS, OTHERS))]
    assert abs(packed[0] - apart[0]) < 1e-5
    assert float((packed[1] - apart[1]).norm() / apart[1].norm()) < 1e-5


def with_first_row(ids: list[int]) -> Sequences:
    return sequences([(ids, [40, 41, 2]), ([9, 10, 11], [12, 13, 2]), ([14], [15, 2])])


@pytest.mark.parametrize("attention", ["recompute", "eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_text_moves_no_bit_of_another(
    make_backbone: Callable[..., Backbone], family: str, attention: str
) -> None:
    """Report huggingface/trl#3067: in naive packing the loss on B changes when A's text does."""
    policy = Policy(make_backbone(family, attention=attention, packing=True), "sft", 1.0, 16)
    one_BR, other_BR = (policy.logprobs_all(with_first_row(ids), 10_000) for ids in ([5, 6, 7, 8], [205, 106, 57, 28]))
    assert not torch.equal(one_BR[0], other_BR[0])
    assert torch.equal(one_BR[1:], other_BR[1:])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_in_reinforcement_the_first_ratio_is_still_1(
    make_backbone: Callable[..., Backbone], quantization: str, checkpointing: bool
) -> None:
    world = World(
        make_backbone,
        ppo_params(),
        lr=0.0,
        quantization=quantization,
        gradient_checkpointing=checkpointing,
        packing=True,
    )
    experience = world.experience(3)
    assert torch.equal(experience.old_logprobs_BR, experience.ref_logprobs_BR)
    stats = world.update(experience, 3)
    assert stats["first_log_ratio_max"] == 0 and stats["log_ratio_max"] < 1e-4


def test_a_model_whose_packed_rows_see_each_other_is_refused(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report huggingface/trl#3067: refuse where it is ignored; here position ids go on from row to row."""
    real = Backbone._hidden_packed

    def counted_on(self: Backbone, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        as_one = real(self, tokens_BT.reshape(1, -1), mask_BT.reshape(1, -1))
        return as_one.view(*tokens_BT.shape, -1)

    monkeypatch.setattr(Backbone, "_hidden_packed", counted_on)
    with pytest.raises(
        BaseModelError, match=r"runtime.packing is true but in a llama rows .* see each other; set it to false"
    ):
        make_backbone(packing=True)
