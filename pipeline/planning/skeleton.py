"""A backbone of shapes alone: the base of a configuration, quantised, with adapters, and what each part of it takes.

Axes: I in, O out.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from pipeline import attention as recompute
from pipeline import blocks
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.loading import output_head_name, without_dropout
from pipeline.params.base import BaseParams, LoraParams
from pipeline.planning.live import META, empty, size_of
from pipeline.quantization import FrozenLinear4bit

# bitsandbytes' NF4 with double quantisation (Dettmers et al. 2023, section 3): 4 bits a weight, an 8-bit scale for each
# block of 64, a float32 scale for each 256 of those; and for each layer two tables, of 16 and of 256 float32, and an offset.
BLOCK, SCALES_BLOCK = 64, 256
TABLES = 4 * (16 + 256 + 1)
# What a CPU has at once of each weight of the layer that is quantised (bitsandbytes' quantize_4bit): it in 16 bits, three
# float32 (as it is, scaled, cut to -1 .. 1; later 32-bit codes instead), and codes of a byte.
QUANTISING = 2 + 3 * 4 + 2
SDPA = "planned_sdpa"


@dataclass(frozen=True)
class BaseShape:
    """How the base is held.

    cache: dequantised weights are kept.
    """

    config: PretrainedConfig
    params: BaseParams
    attention: str
    cache: bool
    checkpointing: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of forward passes."""
        return getattr(torch, self.params.dtype)


class PlannedLinear4bit(FrozenLinear4bit):
    """The forward of ours over a weight that is not there."""

    def dequantized(self) -> Tensor:
        """[out, in]."""
        return empty(self.out_features, self.in_features, dtype=self.compute_dtype)


class PlannedBackbone(Backbone):
    """A backbone that has shapes and no values."""

    adapter: str  # the one that passes are done with


def build(shape: BaseShape, layers: int, adapters: Sequence[str], lora: LoraParams | None = None) -> PlannedBackbone:
    """The backbone with `layers` of its layers; passes are done with the last of the adapters."""
    config = copy.deepcopy(shape.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    without_dropout(config)
    attention = SDPA if shape.attention == "sdpa" else shape.attention
    with META:
        causal = AutoModelForCausalLM.from_config(config, dtype=shape.dtype, attn_implementation=attention)
    blocks.replace_forwards(causal)
    if shape.params.quantization == "nf4":
        _quantise(causal, shape)
    blocks.join_weights(causal)
    backbone = PlannedBackbone(causal, META, BaseIdentity("", 0, ""), shape.checkpointing)
    backbone.adapter = adapters[-1] if adapters else ""
    for name in adapters:
        backbone.add_adapter(name, lora)
    return backbone


def quantised_size(layer: nn.Linear | Conv1D) -> int:
    """Bytes of a linear's weight in NF4 with double quantisation, its scales and tables included."""
    weights = layer.weight.numel()
    scales = -(-weights // BLOCK)
    return weights // 2 + scales + 4 * -(-scales // SCALES_BLOCK) + TABLES


def frozen_sizes(backbone: PlannedBackbone) -> dict[str, int]:
    """Bytes of the base: quantised weights, all others, dequantised copies; of its linears in forward precision; and the most that quantising one takes."""
    linears = [module for module in backbone.causal.modules() if isinstance(module, PlannedLinear4bit)]
    packed = {id(layer.weight) for layer in linears}
    others = [
        tensor
        for name, tensor in [*backbone.causal.named_parameters(), *backbone.causal.named_buffers()]
        if id(tensor) not in packed and ".lora_" not in name
    ]
    return {
        "quantised": sum(map(quantised_size, linears)),
        "unquantised": size_of(others),
        "linears": sum(layer.weight.numel() for layer in _linears(backbone)) * backbone.head_VH.itemsize,
        "cache": size_of(layer.cached_weight_OI for layer in linears if layer.cached_weight_OI is not None),
        "quantising": QUANTISING * max((layer.in_features * layer.out_features for layer in linears), default=0),
    }


def _linears(backbone: PlannedBackbone) -> list[nn.Linear | Conv1D]:
    """All but the output head."""
    head = backbone.head_VH
    return [
        module
        for module in backbone.causal.modules()
        if isinstance(module, nn.Linear | Conv1D) and module.weight is not head
    ]


def _quantise(causal: nn.Module, shape: BaseShape) -> None:
    """Puts 4-bit linears in the place of all but the output head, as transformers does."""
    head = output_head_name(causal)
    for name, linear in list(causal.named_modules()):
        if name == head or not isinstance(linear, nn.Linear | Conv1D):
            continue
        inward, outward = linear.weight.shape if isinstance(linear, Conv1D) else reversed(linear.weight.shape)
        packed = bnb.nn.Linear4bit(
            inward, outward, linear.bias is not None, compute_dtype=shape.dtype, quant_type="nf4", device=META
        )
        packed.__class__ = PlannedLinear4bit
        if linear.bias is not None:
            packed.bias = linear.bias
        if shape.cache:
            packed.cached_weight_OI = packed.dequantized()
        causal.set_submodule(name, packed)
    causal.is_loaded_in_4bit = True  # PEFT asks


class _Attention(torch.autograd.Function):
    """What a fused kernel keeps: its arguments, its result, and a float32 normaliser for each query of each head."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, bias, out, empty(*query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*map(torch.empty_like, ctx.saved_tensors[:3]), None)


def _fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object
) -> tuple[Tensor, None]:
    """The shapes of transformers' sdpa with a mask: keys and values are repeated, the mask is made a bias of their type."""
    groups = getattr(module, "num_key_value_groups", 1)
    bias = torch.empty_like(attention_mask, dtype=query.dtype)
    out = _Attention.apply(query, repeat_kv(key, groups), repeat_kv(value, groups), bias)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: object, **kwargs: object) -> Tensor:
    """With a mask even where no row is padded: whether one is cannot be read from shapes."""
    return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


recompute.register()
AttentionInterface.register(SDPA, _fused_attention)
AttentionMaskInterface.register(SDPA, _mask)
