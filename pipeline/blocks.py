"""The elementwise parts of a Llama-like block, with less kept for the backward pass: RMS norm and gated MLP.

autograd keeps a float32 copy of each norm's input, and three tensors of the MLP's inner width where two do. What these
functions compute forward is what transformers computes, to the bit.

Axes: I inner width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm


class RMSNorm(nn.Module):
    """weight * x / rms(x), with a frozen weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return _RMSNorm.apply(x, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))


def replace_forwards(model: nn.Module) -> None:
    """Gives the blocks of Llama, Mistral and Qwen2 these forwards, in place; other models keep their own."""
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm | MistralRMSNorm | Qwen2RMSNorm):
            module.__class__ = RMSNorm
        elif isinstance(module, LlamaMLP | MistralMLP | Qwen2MLP) and module.config.hidden_act == "silu":
            module.__class__ = GatedMLP


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight_H, scale)
        return weight_H * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight_H, scale = ctx.saved_tensors
        normed = x.float().mul_(scale)
        grad_normed = (grad * weight_H).float()
        along = (grad_normed * normed).mean(-1, keepdim=True)
        return grad_normed.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_I: Tensor, up_I: Tensor) -> Tensor:
        ctx.save_for_backward(gate_I, up_I)
        return F.silu(gate_I).mul_(up_I)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_I, up_I = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up_I, gate_I), F.silu(gate_I).mul_(grad)
