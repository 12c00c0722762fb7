"""Plain attention that keeps no scores for the backward pass.

transformers' own plain ("eager") attention keeps two tensors of [B, heads, T, T] per layer and copies of the keys and values for
every query head; torch's fused one needs neither, but its bfloat16 backward on CPU takes four times as long. This one
makes scores again in the backward pass, for a few rows of the batch at a time, and lets the query heads of a group share
their keys: the same numbers as eager, up to rounding.

Axes: B batch, Q query heads, K key heads, G = Q / K query heads per key head, T query tokens, S key tokens, D head size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

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


class _Attention(torch.autograd.Function):
    """softmax(q k^T * scale + mask) v, [B, Q, T, D]."""

    @staticmethod
    def forward(ctx: Any, q_BQTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        q_BKXD = _grouped(q_BQTD, k_BKSD.shape[1])
        out_BKXD = torch.empty_like(q_BKXD, memory_format=torch.contiguous_format)
        for rows in _pieces(q_BKXD, k_BKSD):
            weights = _weights(q_BKXD[rows], k_BKSD[rows], mask, rows, q_BQTD.shape[2], scale)
            out_BKXD[rows] = weights.to(v_BKSD.dtype) @ v_BKSD[rows]
        ctx.save_for_backward(q_BQTD, k_BKSD, v_BKSD, mask)
        ctx.scale = scale
        return out_BKXD.view(q_BQTD.shape)

    @staticmethod
    def backward(ctx: Any, grad_BQTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BQTD, k_BKSD, v_BKSD, mask = ctx.saved_tensors
        q_BKXD, grad_BKXD = (_grouped(x, k_BKSD.shape[1]) for x in (q_BQTD, grad_BQTD))
        grads = grad_q, grad_k, grad_v = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BKXD, k_BKSD, v_BKSD)
        ]
        for rows in _pieces(q_BKXD, k_BKSD):
            q, k, grad = q_BKXD[rows], k_BKSD[rows], grad_BKXD[rows]
            weights = _weights(q, k, mask, rows, q_BQTD.shape[2], ctx.scale)
            grad_v[rows] = weights.to(grad.dtype).mT @ grad
            grad_weights = (grad @ v_BKSD[rows].mT).float()
            # softmax: weights * (grad - sum of grad * weights)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, torch.float32).mul_(ctx.scale)
            grad_scores = grad_scores.to(q.dtype)
            grad_q[rows] = grad_scores @ k
            grad_k[rows] = grad_scores.mT @ q
        return grads[0].view(q_BQTD.shape), grad_k, grad_v, None, None


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
