"""Attention, norms and MLPs of ours against those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worlds import FAMILIES

from pipeline import attention, blocks
from pipeline.backbone import Backbone
from pipeline.data.examples import sequences
from pipeline.roles import Policy

ROWS = sequences([([5 + n] * (2 + 3 * n), [*range(40 + n, 44 + 2 * n), 2]) for n in range(5)])


def logprobs_and_gradients(backbone: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = backbone.train("sft")
    with backbone.training(dropout=False):
        logprobs_BR = Policy(backbone, "sft", 1.0, 64)(ROWS).logprobs_BR
        logprobs_BR.sum().backward()
    return logprobs_BR.detach(), torch.cat([parameter.grad.flatten() for parameter in parameters])


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
@pytest.mark.parametrize("at_once", [attention.SCORES_AT_ONCE, 1])
def test_attention_is_eager_attention(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch, family: str, at_once: int
) -> None:
    """With two query heads to a key head in Llama, Mistral and Qwen2; all rows at once, and one at a time."""
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", at_once)
    ours, theirs = (logprobs_and_gradients(make_backbone(family, attention=kind)) for kind in ("recompute", "eager"))
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-5)
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 2e-6


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_blocks_are_those_of_transformers(tiny_folders: Callable[..., Path], family: str) -> None:
    """Logits, and the gradient that goes into the embeddings; norms and MLPs alone to the bit, joined products up to rounding."""
    found = []
    for replaced in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_folders(family)).requires_grad_(False)
        if replaced:
            blocks.replace_forwards(model)
        names = {type(module).__name__ for module in model.modules()}
        assert ({"GatedMLP", "RMSNorm"} <= names) == (replaced and family != "gpt2")
        x = model.get_input_embeddings().weight[None, 5:25].clone().requires_grad_()
        logits = model(inputs_embeds=x).logits
        logits.square().sum().backward()
        found.append((logits.detach(), x.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6 * float(found[0][0].abs().max()))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6 * float(found[0][1].abs().max()))


def test_scores_are_not_kept(make_backbone: Callable[..., Backbone]) -> None:
    """Nothing as large as rows times heads times tokens squared is saved for the backward pass."""
    saved: dict[str, list[int]] = {}
    rows = sequences([([5] * 60, [6] * 60)])
    for kind in ("recompute", "eager"):
        backbone = make_backbone(attention=kind)
        backbone.train("sft")
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            Policy(backbone, "sft", 1.0, 64)(rows)
        saved[kind] = sizes
    scores = 4 * 120**2
    assert scores in saved["eager"] and max(saved["recompute"]) < scores
