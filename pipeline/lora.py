"""LoRA layers that work in the base's precision.

PEFT's own forward casts every activation to the adapter's float32 and back. Casting the two small matrices instead is
the same mathematics with a 16-bit copy of the adapter, made anew in each forward; gradients, optimizer moments and saved
weights stay float32. Measured with SmolLM2-135M in bfloat16 on two CPU cores: docs/performance.md.
"""

import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import BaseModelError


class _InBasePrecision:
    """The forward of the subclasses below; dropout, scaling and adapter switching as in PEFT."""

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + B(A(dropout(x))) * scaling; [..., out]."""
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            a_RI = self.lora_A[name].weight.to(x.dtype)
            b_OR = self.lora_B[name].weight.to(x.dtype)
            result = result + F.linear(F.linear(self.lora_dropout[name](x), a_RI) * self.scaling[name], b_OR)
        return result


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
