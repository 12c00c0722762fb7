"""4-bit linears with one forward of ours.

bitsandbytes quantises and dequantises; it never multiplies. Its own forward repacks weights in place after an eval pass
on some CPUs, and later training passes then send no gradient below that layer, without any exception; on CUDA, passes
with and without gradient may take different kernels. One function for every pass keeps log-probabilities and gradients
equal, and it can read a dequantised copy of the weights where memory allows, with the same bits.
"""

from typing import Any

import bitsandbytes as bnb
import psutil
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.errors import BaseModelError

IN_MULTIPLE, OUT_MULTIPLE = 64, 32


class FrozenLinear4bit(bnb.nn.Linear4bit):
    """A `Linear4bit` whose forward is F.linear on the dequantised weight. Made by `replace_forwards`."""

    support_avx512bf16_for_cpu = False  # no repacking
    cached_weight_OI: Tensor | None = None

    def dequantized(self) -> Tensor:
        """The weight in the compute dtype; [out, in]."""
        return dequantize_4bit(self.weight.data, self.quant_state).to(self.compute_dtype)

    @property
    def weight_OI(self) -> Tensor:
        """The cached weight, or one that is dequantised now."""
        return self.dequantized() if self.cached_weight_OI is None else self.cached_weight_OI

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight^T + bias, in the compute dtype; [..., out]."""
        if self.cached_weight_OI is not None:
            bias_O = None if self.bias is None else self.bias.to(self.compute_dtype)
            return F.linear(x.to(self.compute_dtype), self.cached_weight_OI, bias_O)
        return _Linear.apply(x.to(self.compute_dtype), self)


class _Linear(torch.autograd.Function):
    """A frozen linear whose graph holds the layer, not its weight: without a cache, one dequantised weight exists at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear4bit) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(), None if layer.bias is None else layer.bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantized(), None


def check_shapes(model: nn.Module, skipped: set[str]) -> None:
    """Refuses layers that NF4 blocks do not fit.

    Raises:
        BaseModelError: names the first such layer and its shape.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or name in skipped:
            continue
        # GPT-2's Conv1D is a linear whose weight is [in, out]; it is quantised as its transpose
        inward, outward = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        if inward % IN_MULTIPLE or outward % OUT_MULTIPLE:
            raise BaseModelError(
                f"base.quantization is nf4 but layer {name} is {inward} in, {outward} out; "
                f"NF4 needs multiples of {IN_MULTIPLE} in and {OUT_MULTIPLE} out; set base.quantization: none."
            )


def replace_forwards(model: nn.Module, compute_dtype: torch.dtype) -> list[FrozenLinear4bit]:
    """Gives every `Linear4bit` the forward of ours, in place; the layers concerned."""
    layers = []
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.__class__ = FrozenLinear4bit
            module.compute_dtype = compute_dtype
            module.quant_state = module.weight.quant_state  # FSDP puts a plain parameter in the weight's place
            layers.append(module)
    return layers


def fill_cache(layers: list[FrozenLinear4bit], wanted: str, device: torch.device) -> None:
    """Keeps dequantised weights where `wanted` (auto, on, off) and memory say so.

    auto keeps them when they take less than half of the memory that is free.
    """
    elements = sum(layer.out_features * layer.in_features for layer in layers)
    needed = elements * layers[0].compute_dtype.itemsize if layers else 0
    if keeps_cache(wanted, needed, free_memory(device)):
        for layer in layers:
            layer.cached_weight_OI = layer.dequantized()


def keeps_cache(wanted: str, needed: int, free: int) -> bool:
    """Whether dequantised weights of `needed` bytes are kept where so many are free."""
    return wanted == "on" or (wanted == "auto" and needed < free / 2)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
