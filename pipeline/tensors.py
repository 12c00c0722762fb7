"""Small pure functions over tensors.

Axes: B batch, R response tokens, T all tokens, N tokens counted one by one, H hidden, V vocabulary.
Masks: True = counts, the end token included.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far beyond any ratio that means something, far from overflow


def length_mask(lengths_B: Tensor, width: int) -> Tensor:
    """True at the first `lengths_B[b]` places of row b; [B, width]."""
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The sum over counting places; what stands elsewhere, even NaN, does not matter."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over counting places; 0 where nothing counts."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_center(x: Tensor, mask: Tensor) -> Tensor:
    """x less its mean over counting places; 0 elsewhere."""
    return torch.where(mask, x - masked_mean(x, mask), 0)


def masked_scale(x: Tensor, mask: Tensor) -> Tensor:
    """x / sqrt(mean of x^2 + 1e-8) over counting places, the mean left in; 0 elsewhere."""
    x = torch.where(mask, x, 0)
    return x * torch.rsqrt(masked_mean(x**2, mask) + 1e-8)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over counting places, population variance; 0 elsewhere.

    With one counting element, or elements that are all equal, the result is 0: finite, and without effect.
    """
    return masked_scale(masked_center(x, mask), mask)


def safe_exp(x: Tensor) -> Tensor:
    """exp with its argument, and nothing else, clamped to -+20."""
    return torch.exp(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def token_logprobs(hidden_NH: Tensor, head_VH: Tensor, ids_N: Tensor, temperature: float, chunk: int) -> Tensor:
    """Log-probabilities of `ids_N` under softmax(hidden @ head^T / temperature), in float32; [N].

    The logits of `chunk` tokens exist at a time, in the backward pass too, where they are computed again: memory grows
    with the number of tokens, not with tokens times vocabulary. The head gets no gradient: it is frozen.
    This is the one function for policy, reference and update.
    """
    return _TokenLogprobs.apply(hidden_NH, head_VH, ids_N, temperature, chunk)


@torch.no_grad()
def token_logprobs_and_entropies(
    hidden_NH: Tensor, head_VH: Tensor, ids_N: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, the same numbers, with the entropy in nats of each token's distribution; float32, [N] each."""
    logprobs_N = torch.empty(len(ids_N), device=ids_N.device)
    entropies_N = torch.empty_like(logprobs_N)
    for rows, logits_CV in _logit_chunks(hidden_NH, head_VH, temperature, chunk):
        logprobs_N[rows], normalizers_C = _select(logits_CV, ids_N[rows])
        entropies_N[rows] = torch.special.entr(logits_CV.sub_(normalizers_C[:, None]).exp_()).sum(-1)
    return logprobs_N, entropies_N


def _logit_chunks(hidden_NH: Tensor, head_VH: Tensor, temperature: float, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(hidden_NH), chunk):
        rows = slice(start, start + chunk)
        # contiguous: on CPU in bfloat16 a frozen head on a non-contiguous slice is 300 times slower
        yield rows, F.linear(hidden_NH[rows].contiguous(), head_VH).float().div_(temperature)


def _select(logits_CV: Tensor, ids_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the ids, and the log-normalisers; [C] each."""
    normalizers_C = logits_CV.logsumexp(-1)
    return logits_CV.gather(-1, ids_C[:, None]).squeeze(-1) - normalizers_C, normalizers_C


class _TokenLogprobs(torch.autograd.Function):
    """Keeps hidden states and log-normalisers for the backward pass, never logits."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, ids_N: Tensor, temperature: float, chunk: int) -> Tensor:
        logprobs_N = torch.empty(len(ids_N), device=ids_N.device)
        normalizers_N = torch.empty_like(logprobs_N)
        for rows, logits_CV in _logit_chunks(hidden_NH, head_VH, temperature, chunk):
            logprobs_N[rows], normalizers_N[rows] = _select(logits_CV, ids_N[rows])
        ctx.save_for_backward(hidden_NH, head_VH, ids_N, normalizers_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d logp / d logits = (one-hot - softmax) / temperature."""
        hidden_NH, head_VH, ids_N, normalizers_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        for rows, logits_CV in _logit_chunks(hidden_NH, head_VH, ctx.temperature, ctx.chunk):
            scale_C1 = grad_N[rows, None] / ctx.temperature
            grad_CV = logits_CV.sub_(normalizers_N[rows, None]).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, ids_N[rows, None], scale_C1)
            grad_hidden_NH[rows] = grad_CV.to(head_VH.dtype) @ head_VH
        return grad_hidden_NH, None, None, None, None
