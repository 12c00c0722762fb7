"""Model families: what one has and others have not, from GPT-2's transposed linears to sliding windows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from conftest import LORA, base_params, runtime
from peft import PeftModel
from transformers import AutoModelForCausalLM
from worlds import FAMILIES, LINEARS, PROMPTS, SAMPLING

from pipeline.backbone import Backbone, BaseIdentity
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.errors import BaseModelError, ParameterError
from pipeline.loading import load_backbone
from pipeline.lora import Linear4bit
from pipeline.quantization import FrozenLinear4bit
from pipeline.roles import Policy
from pipeline.rollout import generate

SHAPES_OF_ONE_FAMILY = {
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "gpt2 with an output matrix of its own": ("gpt2", {"tie_word_embeddings": False}),
    "qwen2 with tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a sliding window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "tie_word_embeddings": False},
    ),
    "mistral with a sliding window": ("mistral", {"sliding_window": 6}),
}


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("case", SHAPES_OF_ONE_FAMILY)
def test_sampled_logprobs_are_those_of_a_plain_forward(
    make_backbone: Callable[..., Backbone], case: str, quantization: str
) -> None:
    """Prompts of 3 to 24 tokens and 10 new ones: a window of 6 leaves most of them out, in the cache as in the mask."""
    family, overrides = SHAPES_OF_ONE_FAMILY[case]
    policy = Policy(make_backbone(family, quantization=quantization, overrides=overrides), "sft", 1.0, 16)
    rollout = generate(policy, PROMPTS, SAMPLING, step=0)
    torch.testing.assert_close(rollout.behaviour_logprobs_BR, policy.logprobs_all(rollout, 100), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_of_the_blocks_is_quantised_and_adapted(
    make_backbone: Callable[..., Backbone], family: str
) -> None:
    backbone = make_backbone(family, quantization="nf4")
    adapted = [name for name, module in backbone.causal.named_modules() if isinstance(module, Linear4bit)]
    quantised = [name for name, module in backbone.causal.named_modules() if isinstance(module, FrozenLinear4bit)]
    assert quantised == [f"{name}.base_layer" for name in adapted]
    assert len(adapted) == LINEARS[family]


def test_conv1d_is_quantised_as_the_linear_that_it_is(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path]
) -> None:
    """GPT-2 keeps weights as [in, out]. NF4 blocks must run along the input, as in every other linear."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_folders("gpt2"), dtype=torch.float32).requires_grad_(False)
    backbone = make_backbone("gpt2", quantization="nf4", adapters=(), base_cache="off")
    for name, layer in backbone.causal.named_modules():
        if isinstance(layer, FrozenLinear4bit):
            conv = plain.get_submodule(name)
            packed, scales = quantize_4bit(conv.weight.T.contiguous(), quant_type="nf4", compress_statistics=True)
            weight_OI = dequantize_4bit(packed, scales)
            assert torch.equal(layer.dequantized(), weight_OI)
            assert 0.01 < float((weight_OI - conv.weight.T).norm() / conv.weight.norm()) < 0.15
            x = torch.randn(3, conv.weight.shape[0])
            torch.testing.assert_close(layer(x), x @ weight_OI.T + conv.bias)


def test_a_conv1d_that_nf4_does_not_fit_is_named(tiny_folders: Callable[..., Path]) -> None:
    with pytest.raises(
        BaseModelError,
        match=r"base\.quantization is nf4 but layer transformer\.h\.0\.mlp\.c_proj is 96 in, 64 out; NF4 needs",
    ):
        load_backbone(
            tiny_folders("gpt2", n_inner=96), base_params(quantization="nf4"), runtime(), BaseIdentity("f", 259, "tiny")
        )


def test_an_adapter_of_a_quantised_gpt2_is_one_that_peft_puts_on_the_plain_one(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path], tmp_path: Path
) -> None:
    """To serve it: the same logits as ours on the unquantised base, in fp32."""
    make_backbone("gpt2", quantization="nf4").save_adapter("sft", tmp_path)
    plain = make_backbone("gpt2", adapters=())
    plain.load_adapter("sft", tmp_path)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_folders("gpt2"), dtype=torch.float32), tmp_path
    )
    ids_BT = torch.tensor([PROMPTS[3].ids])
    with torch.no_grad():
        expected = theirs(input_ids=ids_BT).logits
        ours = F.linear(plain.hidden(ids_BT, torch.ones_like(ids_BT).bool()), plain.head_VH)
        plain.activate(None)
        without = F.linear(plain.hidden(ids_BT, torch.ones_like(ids_BT).bool()), plain.head_VH)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert float((ours - without).abs().max()) > 1e-2


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["q_proj", "embed_tokens"]], ids="+".join)
def test_adapters_that_would_never_move_are_refused(make_backbone: Callable[..., Backbone], targets: list[str]) -> None:
    """Log-probabilities read the output matrix itself: an adapter on it would be saved and shown, and never trained."""
    with pytest.raises(
        BaseModelError, match=rf"lora\.targets names .*{targets[1]}, the output head or no linear layer"
    ):
        make_backbone(adapters=()).add_adapter("sft", LORA.model_copy(update={"targets": targets}))


def test_rows_longer_than_the_models_positions_are_refused_before_any_weight_is_loaded(
    tiny_folders: Callable[..., Path],
) -> None:
    """GPT-2 has a table of positions: beyond it a GPU stops with an assertion that names nothing. 60 + 39 + an end token = 100."""
    folder = tiny_folders("gpt2", n_positions=100)
    assert load_tokenizer(folder, max_prompt=60, max_response=39).max_prompt == 60
    with pytest.raises(
        ParameterError,
        match=r"tokens\.max_prompt is 60 and tokens\.max_response 40 but with an end token they must fit the 100 positions of "
        r"base\.model; lower one, so that together they are at most 99\.",
    ):
        load_tokenizer(folder, max_prompt=60, max_response=40)
