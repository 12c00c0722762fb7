"""Linears as one product: by hand, against transformers with PEFT, and where their weights lie."""

from collections.abc import Callable

import pytest
import torch
from conftest import LORA
from peft.tuners import lora
from test_blocks import logprobs_and_gradients

import pipeline.backbone
from pipeline import blocks
from pipeline.backbone import Backbone
from pipeline.lora import Linear
from pipeline.side_by_side import SideBySide, joined, lay_together, lie_together, spans, weight_of

FAMILIES = ("llama", "mistral", "qwen2")  # qwen2 has biases in q, k and v
TARGETS = ("all-linear", ["v_proj", "up_proj"])


def linear(weight: list[list[float]], bias: list[float] | None = None) -> torch.nn.Linear:
    layer = torch.nn.Linear(len(weight[0]), len(weight), bias=bias is not None).requires_grad_(False)
    layer.weight.copy_(torch.tensor(weight))
    if bias is not None:
        layer.bias.copy_(torch.tensor(bias))
    return layer


@pytest.fixture
def two_linears() -> tuple[Linear, torch.nn.Linear]:
    """x -> x0 + 2 x1 + 3 * 2 (x0 - x1), by an adapter of scaling 2; and 10 x0."""
    adapted = Linear(linear([[1.0, 2.0]]), "a", config=lora.LoraConfig(), r=1, lora_alpha=2)
    with torch.no_grad():
        adapted.lora_A["a"].weight.copy_(torch.tensor([[1.0, -1.0]]))
        adapted.lora_B["a"].weight.copy_(torch.tensor([[3.0]]))
    return adapted, linear([[10.0, 0.0]])


def test_values_and_gradients_by_hand(two_linears: tuple[Linear, torch.nn.Linear]) -> None:
    """At twice x = (1, 0): x' = (2, 0), the first gives 2 + 6 * 2 = 14, the second 20; the residual is 100.

    With the gradient (1, 1): of x' (1 + 6 + 10, 2 - 6), doubled; of A 2 * 3 * x'; of B 2 * (x'0 - x'1).
    """
    x, residual = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([[100.0, 100.0]], requires_grad=True)
    result = SideBySide(*two_linears)(x, before=lambda x: (2 * x, lambda grad: 2 * grad), residual=residual)
    assert result.tolist() == [[114.0, 120.0]]
    result.sum().backward()
    adapted = two_linears[0]
    assert x.grad.tolist() == [[34.0, -8.0]] and residual.grad.tolist() == [[1.0, 1.0]]
    assert adapted.lora_A["a"].weight.grad.tolist() == [[12.0, 0.0]]
    assert adapted.lora_B["a"].weight.grad.tolist() == [[4.0]]


def test_a_matrix_that_changes_before_the_backward_pass_is_noticed(two_linears: tuple[Linear, torch.nn.Linear]) -> None:
    result = SideBySide(*two_linears)(torch.ones(1, 2))
    with torch.no_grad():
        two_linears[0].lora_A["a"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "some"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_those_of_transformers_with_peft(
    make_backbone: Callable[..., Backbone],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    targets: str | list[str],
    checkpointing: bool,
) -> None:
    """Log-probabilities and the gradients of all adapters, rows of unequal lengths, in float32."""
    params = LORA.model_copy(update={"targets": targets})
    ours = logprobs_and_gradients(make_backbone(family, lora=params, gradient_checkpointing=checkpointing))
    monkeypatch.setattr(blocks, "replace_forwards", lambda model: None)
    monkeypatch.setattr(pipeline.backbone, "replace_forwards", lambda model: None)
    plain = make_backbone(family, lora=params, attention="eager")
    assert not any(type(module).__module__.startswith("pipeline.") for module in plain.causal.modules())
    theirs = logprobs_and_gradients(plain)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-5)
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 2e-6


def test_with_dropout_each_linear_has_an_input_of_its_own(make_backbone: Callable[..., Backbone]) -> None:
    """The same seed drops the same inputs; without dropout nothing is dropped, though the parameter is set."""
    backbone = make_backbone(lora=LORA.model_copy(update={"dropout": 0.5}))
    x = torch.randn(1, 6, 64)
    layer = backbone.causal.base_model.layers[0]
    rotation = backbone.causal.base_model.rotary_emb(x, torch.arange(6)[None])

    def outputs(dropout: bool) -> list[torch.Tensor]:
        found = []
        with backbone.training(dropout), torch.no_grad():
            for seed in (0, 0, 1):
                torch.manual_seed(seed)
                found.append(layer(x, position_embeddings=rotation))
        return found

    first, again, other = outputs(dropout=True)
    assert torch.equal(first, again) and not torch.equal(first, other)
    first, _, other = outputs(dropout=False)
    assert torch.equal(first, other)


@pytest.mark.parametrize("keys", [{}, {"quantization": "nf4", "base_cache": "on"}], ids=["plain", "nf4 with cache"])
def test_weights_of_a_block_lie_together_and_take_no_more_memory(
    make_backbone: Callable[..., Backbone], keys: dict[str, str]
) -> None:
    """A tiny Llama: q of 64 x 64, k and v of 32 x 64; gate and up of 128 x 64."""
    backbone = make_backbone(**keys)
    block = backbone.causal.base_model.layers[1]
    attention, mlp = block.self_attn, block.mlp
    for rows, layers in (
        (128, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (256, (mlp.gate_proj, mlp.up_proj)),
    ):
        weights = [weight_of(layer.base_layer) for layer in layers]
        whole = joined(weights)
        assert lie_together(weights) and whole.shape == (rows, 64)
        assert whole.data_ptr() == weights[0].data_ptr() and torch.equal(whole, torch.cat(weights))
        assert weights[0].untyped_storage().nbytes() == rows * 64 * 4


def test_weights_that_lie_apart_are_joined_by_a_copy() -> None:
    layers = linear([[1.0, 2.0]]), linear([[3.0, 4.0], [5.0, 6.0]])
    weights = [weight_of(layer) for layer in layers]
    assert not lie_together(weights)
    assert joined(weights).tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    lay_together(*layers)
    assert lie_together([weight_of(layer) for layer in layers]) and not lie_together([*map(weight_of, layers)][::-1])
    assert layers[1].weight.tolist() == [[3.0, 4.0], [5.0, 6.0]]


def test_spans() -> None:
    assert spans([2, 3, 1]) == [slice(0, 2), slice(2, 5), slice(5, 6)]
