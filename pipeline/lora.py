"""LoRA layers that work in the base's precision and keep little for the backward pass.

PEFT's own forward casts every activation to the adapter's float32 and back. Casting the two small matrices instead is
the same mathematics with a 16-bit copy of the adapter, made anew in each pass; gradients, optimizer moments and saved
weights stay float32. One function does base and adapter together: what the adapter adds is added in place, forward and
backward, and nothing is kept but the input and its low-rank image. Measured: docs/performance.md.

Axes: N tokens, I in, O out, R rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.errors import BaseModelError
from pipeline.quantization import FrozenLinear4bit


class _InBasePrecision:
    """The forward of the subclasses below; dropout, scaling and adapter switching as in PEFT."""

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + B(A(dropout(x))) * scaling; [..., out]."""
        if self.disable_adapters:
            return self.base_layer(x)
        (name,) = self.active_adapters
        dropped = self.lora_dropout[name](x)
        if torch.compiler.is_compiling():  # the compiler fuses the plain formula by itself
            low = F.linear(dropped, self.lora_A[name].weight.to(x.dtype)) * self.scaling[name]
            return self.base_layer(x) + F.linear(low, self.lora_B[name].weight.to(x.dtype))
        return _AdaptedLinear.apply(
            x,
            None if dropped is x else dropped,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
            self.base_layer,
        )


class _AdaptedLinear(torch.autograd.Function):
    """base(x) + scaling * B(A(dropped)); `dropped` is None where it is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, a_RI: Tensor, b_OR: Tensor, scaling: float, base: nn.Module
    ) -> Tensor:
        adapted_NI = (x if dropped is None else dropped).flatten(0, -2)
        result = base(x)
        low_NR = add_adapter_(result, adapted_NI, a_RI.to(x.dtype), b_OR.to(x.dtype), scaling)
        ctx.save_for_backward(adapted_NI, low_NR, a_RI, b_OR)
        ctx.scaling, ctx.base, ctx.in_place = scaling, base, dropped is None
        return result

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        adapted_NI, low_NR, a_RI, b_OR = ctx.saved_tensors
        needs_x, needs_dropped, needs_a, needs_b = ctx.needs_input_grad[:4]
        grad_NO = grad.flatten(0, -2)
        grad_low_NR = (grad_NO @ b_OR.to(grad.dtype)).mul_(ctx.scaling)
        grad_x = grad_dropped = grad_a = grad_b = None
        if needs_x:
            grad_x_NI = grad_NO @ _weight_OI(ctx.base)
            if ctx.in_place:
                grad_x_NI.addmm_(grad_low_NR, a_RI.to(grad.dtype))
            grad_x = grad_x_NI.view(*grad.shape[:-1], -1)
        if needs_dropped:
            grad_dropped = (grad_low_NR @ a_RI.to(grad.dtype)).view(*grad.shape[:-1], -1)
        if needs_a:
            grad_a = (grad_low_NR.T @ adapted_NI).to(a_RI.dtype)
        if needs_b:  # as [R, O] first: on CPU a product with few rows is faster than one with few columns
            grad_b = (low_NR.T @ grad_NO).to(b_OR.dtype).mul_(ctx.scaling).T
        return grad_x, grad_dropped, grad_a, grad_b, None, None


def add_adapter_(result: Tensor, x_NI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """Adds scaling * B A x to `result`, [..., O], in place; the low-rank image A x, [N, R]."""
    low_NR = x_NI @ a_RI.T
    result.view(-1, len(b_OR)).addmm_(low_NR, b_OR.T, alpha=scaling)
    return low_NR


def _weight_OI(base: nn.Module) -> Tensor:
    match base:
        case FrozenLinear4bit():
            return base.weight_OI
        case Conv1D():
            return base.weight.T
    return base.weight


class Linear(_InBasePrecision, lora.Linear):
    """Over a plain linear (or GPT-2's Conv1D)."""


class Linear4bit(_InBasePrecision, lora.Linear4bit):
    """Over a 4-bit linear."""


_OURS = {lora.Linear: Linear, lora.Linear4bit: Linear4bit}


def replace_forwards(model: PreTrainedModel) -> None:
    """Gives every LoRA layer the forward of ours, in place.

    Raises:
        BaseModelError: an adapter lies on the output head, whose matrix log-probabilities read directly, or on a layer
            that is no linear: it would never move.
    """
    output_head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
        if isinstance(module, lora.LoraLayer) and (module is output_head or not isinstance(module, _InBasePrecision)):
            raise BaseModelError(
                f"lora.targets names {name}, the output head or no linear layer, whose adapter would not be trained; "
                "set it to all-linear, or name linear layers inside the blocks."
            )
