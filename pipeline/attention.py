"""Plain attention that keeps no scores for the backward pass.

transformers' own plain ("eager") attention keeps two tensors of [B, heads, T, T] per layer and copies of the keys and values for
every query head; torch's fused one needs neither, but its bfloat16 backward on CPU takes four times as long. This one
makes scores again in the backward pass, for a few rows of the batch at a time, and lets the query heads of a group share
their keys: the same numbers as eager, up to rounding.

Axes: B batch, Q query heads, K key heads, A all of them with K for values, G = Q / K query heads per key head, T query
tokens, S key tokens, D head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward, rotate_half

NAME = "recompute"
SCORES_AT_ONCE = 2**23  # 32 MiB in float32


def attention(
    module: nn.Module,
    query_BQTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, T, Q, D], and no weights. `attention_mask` is added to scores."""
    assert dropout == 0.0, "the base's own dropout is off in every stage"
    scale = query_BQTD.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attention.apply(query_BQTD, key_BKSD, value_BKSD, attention_mask, scale).transpose(1, 2).contiguous(), None


def register() -> str:
    """Makes it known to transformers, under the name that is returned."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def attend_rotated(
    module: nn.Module,
    heads_BTO: Tensor,
    cos_BTD: Tensor,
    sin_BTD: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> Tensor:
    """Attention of queries, keys and values that lie side by side, before rotation, as the module's settings have it; [B, T, Q * D]."""
    size, groups, kind = module.head_dim, module.num_key_value_groups, module.config._attn_implementation
    key_heads = heads_BTO.shape[-1] // size // (groups + 2)
    if kind == NAME:
        return _RotaryAttention.apply(heads_BTO, cos_BTD, sin_BTD, attention_mask, key_heads, module.scaling)
    heads_BATD = heads_BTO.unflatten(-1, (-1, size)).transpose(1, 2)
    q, k, v = heads_BATD.split([groups * key_heads, key_heads, key_heads], dim=1)
    q, k = apply_rotary_pos_emb(q, k, cos_BTD, sin_BTD)
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
    out_BTQD = attend(module, q, k, v, attention_mask, scaling=module.scaling, sliding_window=window, **more)[0]
    return out_BTQD.flatten(2)


class _Attention(torch.autograd.Function):
    """softmax(q k^T * scale + mask) v, [B, Q, T, D]."""

    @staticmethod
    def forward(ctx: Any, q_BQTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q_BQTD, k_BKSD, v_BKSD, mask)
        ctx.scale = scale
        return _attended(q_BQTD, k_BKSD, v_BKSD, mask, scale)

    @staticmethod
    def backward(ctx: Any, grad_BQTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BQTD, k_BKSD, v_BKSD, mask = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BQTD, k_BKSD, v_BKSD)]
        _attended_back(grad_BQTD, q_BQTD, k_BKSD, v_BKSD, mask, ctx.scale, *grads)
        return *grads, None, None


class _RotaryAttention(torch.autograd.Function):
    """The same of q, k and v side by side, [B, T, A * D], which it rotates first; [B, T, Q * D]."""

    @staticmethod
    def forward(
        ctx: Any,
        heads_BTO: Tensor,
        cos_BTD: Tensor,
        sin_BTD: Tensor,
        mask: Tensor | None,
        key_heads: int,
        scale: float,
    ) -> Tensor:
        cos, sin = cos_BTD[:, None], sin_BTD[:, None]
        given_BATD = heads_BTO.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
        rotated_BATD = torch.empty_like(given_BATD, memory_format=torch.contiguous_format)
        qk, v = given_BATD[:, :-key_heads], given_BATD[:, -key_heads:]
        torch.add(qk * cos, rotate_half(qk) * sin, out=rotated_BATD[:, :-key_heads])
        rotated_BATD[:, -key_heads:] = v
        ctx.save_for_backward(rotated_BATD, cos, sin, mask)
        ctx.key_heads, ctx.scale = key_heads, scale
        return _attended(*_split(rotated_BATD, key_heads), mask, scale).transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad_BTO: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        rotated_BATD, cos, sin, mask = ctx.saved_tensors
        grads_BATD = torch.empty_like(rotated_BATD)
        grad_BQTD = grad_BTO.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
        parts, grads = (_split(whole, ctx.key_heads) for whole in (rotated_BATD, grads_BATD))
        _attended_back(grad_BQTD, *parts, mask, ctx.scale, *grads)
        grad_qk = grads_BATD[:, : -ctx.key_heads]
        # rotate_half's transpose is its opposite
        torch.sub(grad_qk * cos, rotate_half(grad_qk * sin), out=grad_qk)
        return grads_BATD.transpose(1, 2).flatten(2), None, None, None, None, None


def _split(heads_BATD: Tensor, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return heads_BATD.split([heads_BATD.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)


def _attended(q_BQTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v, [B, Q, T, D]."""
    q_BKXD = _grouped(q_BQTD, k_BKSD.shape[1])
    out_BKXD = torch.empty_like(q_BKXD, memory_format=torch.contiguous_format)
    for rows in _pieces(q_BKXD, k_BKSD):
        weights = _weights(q_BKXD[rows], k_BKSD[rows], mask, rows, q_BQTD.shape[2], scale)
        out_BKXD[rows] = weights.to(v_BKSD.dtype) @ v_BKSD[rows]
    return out_BKXD.view(q_BQTD.shape)


def _attended_back(
    grad_BQTD: Tensor,
    q_BQTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    scale: float,
    grad_q_BQTD: Tensor,
    grad_k_BKSD: Tensor,
    grad_v_BKSD: Tensor,
) -> None:
    """Fills the last three with the gradients of queries, keys and values."""
    q_BKXD, grad_BKXD = (_grouped(x, k_BKSD.shape[1]) for x in (q_BQTD, grad_BQTD))
    grad_q_BKXD = grad_q_BQTD.view(q_BKXD.shape)
    for rows in _pieces(q_BKXD, k_BKSD):
        q, k, grad = q_BKXD[rows], k_BKSD[rows], grad_BKXD[rows]
        weights = _weights(q, k, mask, rows, q_BQTD.shape[2], scale)
        grad_v_BKSD[rows] = weights.to(grad.dtype).mT @ grad
        grad_weights = (grad @ v_BKSD[rows].mT).float()
        # softmax: weights * (grad - sum of grad * weights)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, torch.float32).mul_(scale)
        grad_scores = grad_scores.to(q.dtype)
        grad_q_BKXD[rows] = grad_scores @ k
        grad_k_BKSD[rows] = grad_scores.mT @ q


def _grouped(x_BQTD: Tensor, key_heads: int) -> Tensor:
    """The query heads of a group one below the other, as if they were more tokens: [B, K, G * T, D]."""
    return x_BQTD.reshape(len(x_BQTD), key_heads, -1, x_BQTD.shape[-1])


def _pieces(q_BKXD: Tensor, k_BKSD: Tensor) -> Iterator[slice]:
    """Rows of the batch whose scores may exist at once."""
    scores_of_a_row = q_BKXD.shape[1] * q_BKXD.shape[2] * k_BKSD.shape[2]
    size = max(1, SCORES_AT_ONCE // scores_of_a_row)
    for start in range(0, len(q_BKXD), size):
        yield slice(start, start + size)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, rows: slice, tokens: int, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) of some rows in float32; [b, K, G * T, S]."""
    scores = (q @ k.mT).mul_(scale)
    if mask is not None:  # [B or 1, 1, T, S]
        by_token = scores.view(len(scores), scores.shape[1], -1, tokens, scores.shape[-1])
        by_token += (mask[rows] if len(mask) > 1 else mask)[:, :, None]
    return torch.softmax(scores, -1, dtype=torch.float32)
