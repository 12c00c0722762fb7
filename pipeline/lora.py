"""LoRA layers that work in the base's precision and keep little for the backward pass.

PEFT's own forward casts every activation to the adapter's float32 and back. Casting the two small matrices instead is
the same mathematics with a 16-bit copy of the adapter, made anew in each pass; gradients, optimizer moments and saved
weights stay float32. Measured: docs/performance.md.
"""

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import BaseModelError
from pipeline.side_by_side import SideBySide, drops_out


class _InBasePrecision:
    """The forward of the subclasses below; dropout, scaling and adapter switching as in PEFT."""

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + B(A(dropout(x))) * scaling; [..., out]."""
        if self.disable_adapters:
            return self.base_layer(x)
        if not drops_out(self) and not torch.compiler.is_compiling():
            return SideBySide(self)(x)
        (name,) = self.active_adapters
        a_RI, b_OR = self.lora_A[name].weight, self.lora_B[name].weight * self.scaling[name]
        low = F.linear(self.lora_dropout[name](x), a_RI.to(x.dtype))
        return self.base_layer(x) + F.linear(low, b_OR.to(x.dtype))


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
