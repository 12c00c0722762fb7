"""A base of a 7B model's shape with random weights, made without network, and quantised matrix by matrix.

The 16-bit model never exists whole: at most one matrix of it at a time. What is measured on it does not depend on what the weights are.
"""

from typing import Any

import bitsandbytes as bnb
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pipeline import attention as recompute
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.loading import as_backbone, attention_of
from pipeline.params.runtime import RuntimeParams
from pipeline.quantization import check_shapes

SPREAD = 0.02  # standard deviation of the weights, as in a model before its training
DTYPE = torch.bfloat16

# config.json of meta-llama/Llama-2-7b, mistralai/Mistral-7B-v0.3, Qwen/Qwen2.5-7B
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "mistral": {
        "model_type": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
    },
    "qwen2.5": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
    # no 7B: it takes the same way through every line, in seconds
    "tiny": {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}


def large_base(name: str, device: torch.device, runtime: RuntimeParams) -> Backbone:
    """The base of that shape on the device, NF4 with double quantisation, used as the stages use theirs."""
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, tie_word_embeddings=False)
    recompute.register()
    causal = _empty(config, attention_of(runtime, device))
    check_shapes(causal, skipped={"lm_head"})
    with torch.device(device):
        torch.manual_seed(0)
        _fill(causal, device)
    return as_backbone(causal, DTYPE, runtime, BaseIdentity("random", 1, name), device)


def _empty(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """The modules without memory for weights; buffers (rotary frequencies) are real."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=attention)


@torch.no_grad()
def _fill(causal: PreTrainedModel, device: torch.device) -> None:
    """Puts packed linears in the place of the blocks' empty ones, then fills the rest: embedding, head, norms."""
    head = causal.get_output_embeddings()
    empty = [name for name, module in causal.named_modules() if isinstance(module, nn.Linear) and module is not head]
    for name in empty:
        causal.set_submodule(name, _random_linear(causal.get_submodule(name), device))
    for module in causal.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(_random(parameter)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _random_linear(empty: nn.Linear, device: torch.device) -> bnb.nn.Linear4bit:
    """The 16-bit matrix lives until it is packed, a line later."""
    layer = bnb.nn.Linear4bit(
        empty.in_features,
        empty.out_features,
        bias=empty.bias is not None,
        compute_dtype=DTYPE,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weights = _random(empty.weight)
    layer.weight = bnb.nn.Params4bit(weights, requires_grad=False, compress_statistics=True, quant_type="nf4").to(
        device
    )
    if empty.bias is not None:
        layer.bias = nn.Parameter(_random(empty.bias), requires_grad=False)
    return layer


def _random(empty: torch.Tensor) -> torch.Tensor:
    """Of its shape on the default device: small numbers for matrices, ones for the scales of norms."""
    if empty.ndim == 1:
        return torch.ones(empty.shape, dtype=DTYPE)
    return torch.randn(empty.shape, dtype=DTYPE) * SPREAD
