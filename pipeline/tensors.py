"""Small pure functions over tensors.

Axes: B batch, R response tokens, T all tokens, N tokens counted one by one, H hidden, V vocabulary.
Masks: True = counts, the end token included.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**25  # 128 MiB in float32, and half of that in 16 bits beside it, whatever the vocabulary
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

    The logits of `chunk` tokens exist at a time, of fewer where LOGITS_AT_ONCE says so: memory grows with the number of
    tokens, neither with tokens times vocabulary nor with the vocabulary. The head gets no gradient: it is frozen.
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
    for rows in _chunks(hidden_NH, head_VH, chunk):
        logprobs_N[rows], entropies_N[rows] = _with_entropies(hidden_NH[rows], head_VH, ids_N[rows], temperature)
    return logprobs_N, entropies_N


def _chunks(hidden_NH: Tensor, head_VH: Tensor, chunk: int) -> list[slice]:
    """Work on a chunk is a function of its own, so that its logits are gone before the next one's are made."""
    size = max(1, min(chunk, LOGITS_AT_ONCE // len(head_VH)))
    return [slice(start, start + size) for start in range(0, len(hidden_NH), size)]


def _with_entropies(hidden_CH: Tensor, head_VH: Tensor, ids_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_C, exps_CV, sums_C1 = _exponentials(hidden_CH, head_VH, ids_C, temperature)
    probabilities_CV = exps_CV.div_(sums_C1)
    return logprobs_C, torch.special.entr(probabilities_CV, out=probabilities_CV).sum(-1)


def _with_slopes(hidden_CH: Tensor, head_VH: Tensor, ids_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """d logp / d logits = (one-hot - softmax) / temperature."""
    logprobs_C, exps_CV, sums_C1 = _exponentials(hidden_CH, head_VH, ids_C, temperature)
    slopes_CV = exps_CV.div_(sums_C1 * -temperature)
    slopes_CV.scatter_add_(1, ids_C[:, None], torch.full_like(sums_C1, 1 / temperature))
    return logprobs_C, slopes_CV.to(head_VH.dtype) @ head_VH


def _exponentials(
    hidden_CH: Tensor, head_VH: Tensor, ids_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the ids, [C]; exp(logit - largest), [C, V]; and its sums, [C, 1]; float32.

    The operations are those of torch.logsumexp, in place: it would need two more tensors of the logits' size.
    """
    # contiguous: on CPU in bfloat16 a frozen head on a non-contiguous slice is 300 times slower
    logits_CV = F.linear(hidden_CH.contiguous(), head_VH).float().div_(temperature)
    chosen_C1 = logits_CV.gather(-1, ids_C[:, None])
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    exps_CV = logits_CV.sub_(largest_C1).exp_()
    sums_C1 = exps_CV.sum(-1, keepdim=True)
    return (chosen_C1 - (sums_C1.log() + largest_C1)).squeeze(1), exps_CV, sums_C1


class _TokenLogprobs(torch.autograd.Function):
    """Takes the derivative while the logits are there: they are made once, and a state per token is all that is kept."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, ids_N: Tensor, temperature: float, chunk: int) -> Tensor:
        logprobs_N = torch.empty(len(ids_N), device=ids_N.device)
        slopes_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        for rows in _chunks(hidden_NH, head_VH, chunk):
            if slopes_NH is None:
                logprobs_N[rows] = _exponentials(hidden_NH[rows], head_VH, ids_N[rows], temperature)[0]
            else:
                logprobs_N[rows], slopes_NH[rows] = _with_slopes(hidden_NH[rows], head_VH, ids_N[rows], temperature)
        ctx.save_for_backward(slopes_NH)
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d logp / d hidden, times what comes from above."""
        (slopes_NH,) = ctx.saved_tensors
        return (grad_N[:, None] * slopes_NH).to(slopes_NH.dtype), None, None, None, None
