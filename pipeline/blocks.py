"""The blocks of Llama, Mistral and Qwen2 as five operations each, with little kept for the backward pass.

What surrounds a block's large products costs as much time as they do: here q, k, v and gate, up are one product each,
norms and gates belong to the product after them and residuals to the one before, and of a token only what is dear to
compute again is kept. Where an adapter's dropout is on, tokens are decoded on a cache, or the compiler makes its own code,
transformers' block runs, on norms and an MLP of ours.

Axes: B batch, T tokens, N = B * T, H hidden, I inner width, O outputs.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm

from pipeline.attention import attend_rotated
from pipeline.side_by_side import Pull, SideBySide, Transformation, drops_out, lay_together


def rms_norm(weight_H: Tensor, epsilon: float, x_NH: Tensor) -> tuple[Tensor, Pull]:
    """weight * x / rms(x), with a frozen weight; as transformers computes it, to the bit."""
    normed = x_NH.float()
    scale = torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = normed * scale

    def pull(grad: Tensor) -> Tensor:
        grad_normed = (grad * weight_H).float()
        along = (grad_normed * normed).mean(-1, keepdim=True)
        return grad_normed.addcmul_(normed, along, value=-1).mul_(scale).to(grad.dtype)

    return weight_H * normed.to(x_NH.dtype), pull


def gated(gate_up_NO: Tensor) -> tuple[Tensor, Pull]:
    """silu(gate) * up, of both side by side; [N, 2 I] -> [N, I]."""
    gate, up = gate_up_NO.chunk(2, dim=-1)
    passed = F.silu(gate)

    def pull(grad: Tensor) -> Tensor:
        grads = torch.empty_like(gate_up_NO)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(passed, grad, out=grad_up)
        return grads

    return passed * up, pull


class _Recomputed(torch.autograd.Function):
    """A transformation that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transformation: Transformation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transformation = transformation
        return transformation(x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.transformation(x)[1](grad), None


class RMSNorm(nn.Module):
    """weight * x / rms(x), with a frozen weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if torch.is_grad_enabled():
            return _Recomputed.apply(x, self.transformation)
        return self.transformation(x)[0]

    @property
    def transformation(self) -> Transformation:
        """The same as what comes before a product."""
        return partial(rms_norm, self.weight, self.variance_epsilon)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(_Recomputed.apply(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1), gated))


class _Block:
    """The forward of the subclasses below."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        """As in transformers; [B, T, H] -> [B, T, H]."""
        attention, mlp, x = self.self_attn, self.mlp, hidden_states
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = (mlp.gate_proj, mlp.up_proj)
        linears = (*qkv, attention.o_proj, *gate_up, mlp.down_proj)
        if cache is not None or torch.compiler.is_compiling() or any(map(drops_out, linears)):
            return super().forward(
                x, attention_mask, position_ids, cache, use_cache, position_embeddings=position_embeddings, **more
            )
        heads = SideBySide(*qkv)(x, before=self.input_layernorm.transformation)
        seen = attend_rotated(attention, heads, *position_embeddings, attention_mask, **more)
        x = SideBySide(attention.o_proj)(seen, residual=x)
        inner = SideBySide(*gate_up)(x, before=self.post_attention_layernorm.transformation)
        return SideBySide(mlp.down_proj)(inner, before=gated, residual=x)


class LlamaBlock(_Block, LlamaDecoderLayer):
    """Llama's."""


class MistralBlock(_Block, MistralDecoderLayer):
    """Mistral's."""


class Qwen2Block(_Block, Qwen2DecoderLayer):
    """Qwen2's."""


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    **dict.fromkeys((LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm), RMSNorm),
    **dict.fromkeys((LlamaMLP, MistralMLP, Qwen2MLP), GatedMLP),
    LlamaDecoderLayer: LlamaBlock,
    MistralDecoderLayer: MistralBlock,
    Qwen2DecoderLayer: Qwen2Block,
}
SAME_BLOCK = (LlamaBlock, MistralBlock, Qwen2Block)


def replace_forwards(model: nn.Module) -> None:
    """Gives the blocks of Llama, Mistral and Qwen2 these forwards, in place; other models keep their own."""
    if getattr(model.config, "hidden_act", None) == "silu":
        for module in model.modules():
            if type(module) in _OURS:
                module.transformers_class = type(module)
                module.__class__ = _OURS[type(module)]


@contextlib.contextmanager
def transformers_forwards(model: nn.Module) -> Iterator[None]:
    """The forwards that `replace_forwards` has replaced, for a while: they call each linear as a module, which can have hooks."""
    ours = [(module, type(module)) for module in model.modules() if type(module) in _OURS.values()]
    try:
        for module, _ in ours:
            module.__class__ = module.transformers_class
        yield
    finally:
        for module, kind in ours:
            module.__class__ = kind


def join_weights(model: nn.Module) -> None:
    """Lays the weights of linears together that are computed as one; once they are quantised and the base cache is filled."""
    for block in model.modules():
        if isinstance(block, _Block):
            lay_together(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
            lay_together(block.mlp.gate_proj, block.mlp.up_proj)
