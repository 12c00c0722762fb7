"""Linears that read the same input, computed as one: q, k, v; gate, up. With their adapters, and little kept for the backward pass.

One large product is faster than three small ones, and one pair of low-rank products than three. What comes before the
linears (a norm, the MLP's gate) is computed again in the backward pass: it is cheap, and would else be kept for each
token. Measured: docs/performance.md.

Axes: N tokens, J features before the transformation, I in, O out (of all linears), R rank (of all adapters).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.quantization import FrozenLinear4bit

Pull = Callable[[Tensor], Tensor]
"""The gradient of a transformation's result -> that of its input."""

Transformation = Callable[[Tensor], tuple[Tensor, Pull]]
"""[N, J] -> [N, I], and the way back."""


class Adapter(NamedTuple):
    """One linear's low-rank part, and where it lies among all."""

    a_RI: nn.Parameter
    b_OR: nn.Parameter
    scaling: float
    outputs: slice
    ranks: slice


class SideBySide:
    """Linears with the adapters that are active. Dropout is left out."""

    def __init__(self, *layers: nn.Module):
        self.bases = [base_of(layer) for layer in layers]
        self._outputs = spans(map(width_of, self.bases))
        self.adapters = list(_adapters(layers, self._outputs))

    def __call__(self, x: Tensor, before: Transformation | None = None, residual: Tensor | None = None) -> Tensor:
        """residual + linears(before(x)); [..., J] -> [..., O], the linears' outputs one after another."""
        matrices = [matrix for adapter in self.adapters for matrix in (adapter.a_RI, adapter.b_OR)]
        return _SideBySide.apply(x, residual, self, before or _unchanged, *matrices)

    def product(self, y_NI: Tensor) -> Tensor:
        """Without adapters; [..., O]."""
        if isinstance(self.bases[0], Conv1D):  # alone: no block of ours has it
            return self.bases[0](y_NI)
        return F.linear(y_NI, self.weight_OI, self.bias_O)

    @property
    def weight_OI(self) -> Tensor:
        """Of all, in the precision of forward passes; a copy only where they do not lie together."""
        if len(self.bases) == 1:
            return weight_of(self.bases[0])
        weights = map(weight_of, self.bases)
        if all(map(is_kept, self.bases)):
            return joined(list(weights))
        # dequantised one after another, so that one of them exists twice at a time
        first_OI = next(weights)
        whole_OI = first_OI.new_empty(self._outputs[-1].stop, first_OI.shape[1])
        for outputs, weight_OI in zip(self._outputs, chain([first_OI], weights), strict=True):
            whole_OI[outputs] = weight_OI
        return whole_OI

    @property
    def bias_O(self) -> Tensor | None:
        """Of all."""
        biases = [bias_of(base) for base in self.bases]
        return None if biases[0] is None else torch.cat(biases)

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The adapters as one: A's above each other, scaled B's on a diagonal; [R, I] and [O, R]."""
        a_RI = torch.cat([adapter.a_RI for adapter in self.adapters]).to(dtype)
        b_OR = torch.zeros(self._outputs[-1].stop, len(a_RI), dtype=dtype, device=a_RI.device)
        for adapter in self.adapters:
            b_OR[adapter.outputs, adapter.ranks] = adapter.b_OR * adapter.scaling
        return a_RI, b_OR


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, linears: SideBySide, before: Transformation, *matrices: Tensor
    ) -> Tensor:
        y_NI = before(x.flatten(0, -2))[0]
        result_NO = linears.product(y_NI)
        low_NR = None
        if matrices:
            a_RI, b_OR = linears.stacked(y_NI.dtype)
            low_NR = add_adapter_(result_NO, y_NI, a_RI, b_OR)
        if residual is not None:
            result_NO += residual.flatten(0, -2)
        ctx.save_for_backward(x, low_NR, *matrices)  # the matrices so that autograd notices a change in between
        ctx.linears, ctx.before = linears, before
        return result_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low_NR, *_ = ctx.saved_tensors
        linears: SideBySide = ctx.linears
        grad_NO = grad.flatten(0, -2)
        y_NI, pull = ctx.before(x.flatten(0, -2))
        needs_x, needs_residual, _, _, *needs_matrices = ctx.needs_input_grad
        if low_NR is not None:
            a_RI, b_OR = linears.stacked(grad.dtype)
            grad_low_NR = grad_NO @ b_OR
        grad_x = None
        if needs_x:
            grad_y_NI = grad_NO @ linears.weight_OI
            if low_NR is not None:
                grad_y_NI.addmm_(grad_low_NR, a_RI)
            grad_x = pull(grad_y_NI).view(x.shape)
        grads: list[Tensor | None] = [None] * len(needs_matrices)
        if any(needs_matrices):
            grad_a_RI = (grad_low_NR.T @ y_NI).float()
            # as [R, O] first: on CPU a product with few rows is faster than one with few columns
            grad_b_RO = (low_NR.T @ grad_NO).float()
            for place, adapter in enumerate(linears.adapters):
                grads[2 * place] = grad_a_RI[adapter.ranks]
                grads[2 * place + 1] = (grad_b_RO[adapter.ranks, adapter.outputs] * adapter.scaling).T
        return grad_x, grad if needs_residual else None, None, None, *grads


def add_adapter_(result_NO: Tensor, y_NI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """Adds B A y to the result, in place; the low-rank image A y, [N, R]."""
    low_NR = y_NI @ a_RI.T
    result_NO.addmm_(low_NR, b_OR.T)
    return low_NR


def _unchanged(x: Tensor) -> tuple[Tensor, Pull]:
    return x, lambda grad: grad


def _adapters(layers: tuple[nn.Module, ...], outputs_of_layers: list[slice]) -> Iterator[Adapter]:
    rank = 0
    for layer, outputs in zip(layers, outputs_of_layers, strict=True):
        if isinstance(layer, LoraLayer) and not layer.disable_adapters:
            (name,) = layer.active_adapters
            if name in layer.lora_A:
                a_RI, b_OR = layer.lora_A[name].weight, layer.lora_B[name].weight
                yield Adapter(a_RI, b_OR, layer.scaling[name], outputs, slice(rank, rank := rank + len(a_RI)))


def drops_out(layer: nn.Module) -> bool:
    """An adapter's dropout is on: each of the linears then sees another input."""
    return (
        isinstance(layer, LoraLayer)
        and layer.training
        and any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in layer.lora_dropout.values())
    )


# --- where weights lie ---


def lay_together(*layers: nn.Module) -> None:
    """Moves the weights of frozen linears into one tensor, of which each then is a part: they are read as one without a copy."""
    bases = [base_of(layer) for layer in layers]
    if all(map(is_kept, bases)):
        whole_OI = torch.cat([weight_of(base) for base in bases])
        for base, outputs in zip(bases, spans(map(width_of, bases)), strict=True):
            if isinstance(base, FrozenLinear4bit):
                base.cached_weight_OI = whole_OI[outputs]
            else:
                base.weight.data = whole_OI[outputs]


def lie_together(weights: list[Tensor]) -> bool:
    """They are parts of one tensor, one after another."""
    same = all(
        weight.is_contiguous() and weight.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        for weight in weights
    )
    return same and all(
        second.storage_offset() == first.storage_offset() + first.numel() for first, second in pairwise(weights)
    )


def joined(weights: list[Tensor]) -> Tensor:
    """One above another, [O, I]; without a copy where they lie so."""
    if not lie_together(weights):
        return torch.cat(weights)
    inward = weights[0].shape[1]
    return weights[0].as_strided((sum(map(len, weights)), inward), (inward, 1))


def spans(sizes: Iterable[int]) -> list[slice]:
    """Where parts of these sizes lie one after another.

    spans([2, 3]) -> [slice(0, 2), slice(2, 5)]
    """
    end = 0
    return [slice(end, end := end + size) for size in sizes]


def base_of(layer: nn.Module) -> nn.Module:
    """The linear under an adapted layer."""
    return layer.base_layer if isinstance(layer, LoraLayer) else layer


def is_kept(base: nn.Module) -> bool:
    """Its weight lies in memory as products read it."""
    return base.cached_weight_OI is not None if isinstance(base, FrozenLinear4bit) else type(base) is nn.Linear


def width_of(base: nn.Module) -> int:
    """How many outputs it has."""
    return base.nf if isinstance(base, Conv1D) else base.out_features


def weight_of(base: nn.Module) -> Tensor:
    """A frozen linear's weight in the precision of forward passes; [O, I]."""
    if isinstance(base, FrozenLinear4bit):
        return base.weight_OI
    return base.weight.data.t() if isinstance(base, Conv1D) else base.weight.data


def bias_of(base: nn.Module) -> Tensor | None:
    """Its bias in the same precision; [O]."""
    if base.bias is None:
        return None
    return base.bias.data.to(base.compute_dtype) if isinstance(base, FrozenLinear4bit) else base.bias.data
