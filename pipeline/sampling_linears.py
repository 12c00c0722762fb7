"""The linears of a model while it samples: nothing trains, so each takes the form that decodes fastest.

On CPU in bfloat16 oneDNN multiplies by a weight that it packed before in about half to two thirds of the time, with the
same bits; the adapter's A is packed below the weight, so that one product does for both.

An adapter can be merged into the weight: its two small products are then paid once per rollout and not once per token.
The base's own weights are never overwritten: what is merged is a copy, or lies in the base cache, which is made anew
from the 4-bit weights after.

Axes: O outputs, I inputs.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.backbone import Backbone
from pipeline.quantization import FrozenLinear4bit, free_memory
from pipeline.side_by_side import SideBySide, base_of, bias_of, is_kept, weight_of

Product = Callable[[Tensor], Tensor]
"""x -> x @ weight^T + bias; [..., I] -> [..., O]."""

PACKED_FOR = 16  # rows; a packed weight serves any other number, and no other size was faster


class SamplingLinears:
    """Makes products of a model's linears with the adapter that is active, or of the raw base's.

    fresh: some weight is made anew in each product, because memory allows no copy.
    """

    def __init__(self, backbone: Backbone, merge: bool):
        self.fresh = False
        self._merge = merge
        self._dtype = backbone.head_VH.dtype
        layers = [layer for _, _, layer in lora_layers(backbone.causal)]
        copy_bytes = sum(layer.in_features * layer.out_features for layer in layers) * self._dtype.itemsize
        self._room = copy_bytes < free_memory(backbone.device) / 2
        self._pack = self._room and can_pack(backbone.head_VH)
        self._overwritten: list[FrozenLinear4bit] = []

    def product(self, *layers: nn.Module) -> Product:
        """Outputs of all `layers`, which read the same input, side by side.

        Without `merge` it has the bits of the layers' own forward.
        """
        linears = SideBySide(*layers)
        if not linears.adapters:
            return self._unadapted(linears)
        if not self._merge:
            return self._with_adapter(linears)
        if self._pack or (self._room and not all(map(_is_cached, linears.bases))):
            return self._held(torch.cat(list(map(_merged, layers))), linears.bias_O)
        return _joined([self._merged_where_it_lies(layer) for layer in layers])

    def output_head(self, head_VH: Tensor) -> Product:
        """Hidden states -> logits in the precision of forward passes."""
        return self._held(head_VH, None)

    def restore(self) -> None:
        """The base cache as it was: dequantised again, never subtracted."""
        while self._overwritten:
            layer = self._overwritten[-1]
            layer.cached_weight_OI.copy_(layer.dequantized())
            self._overwritten.pop()

    def _with_adapter(self, linears: SideBySide) -> Product:
        a_RI, b_OR = linears.stacked(self._dtype)
        outputs, b_RO = len(b_OR), b_OR.T

        def add(result: Tensor, low: Tensor) -> Tensor:
            """Rounded as in training."""
            result.view(-1, outputs).addmm_(low.view(-1, len(b_RO)), b_RO)
            return result

        if self._can_pack(linears):  # one product gives the outputs and the low-rank image
            both = self._held(torch.cat([linears.weight_OI, a_RI]), _padded(linears.bias_O, len(a_RI)))
            return lambda x: add(*both(x).split([outputs, len(b_RO)], dim=-1))
        base = self._unadapted(linears)
        return lambda x: add(base(x), F.linear(x, a_RI))

    def _unadapted(self, linears: SideBySide) -> Product:
        if self._can_pack(linears):
            return self._held(linears.weight_OI, linears.bias_O)
        self.fresh |= any(isinstance(base, FrozenLinear4bit) and not _is_cached(base) for base in linears.bases)
        return linears.product

    def _can_pack(self, linears: SideBySide) -> bool:
        return self._pack and all(map(is_kept, linears.bases))

    def _merged_where_it_lies(self, layer: nn.Module) -> Product:
        base, bias_O = base_of(layer), bias_of(base_of(layer))
        if not _is_cached(base):
            self.fresh = True
            return lambda x: F.linear(x, _merged(layer), bias_O)
        merged_OI = _merged(layer)
        self._overwritten.append(base)  # before it is, so that an interruption in between is put right too
        weight_OI = base.cached_weight_OI.copy_(merged_OI)
        return lambda x: F.linear(x, weight_OI, bias_O)

    def _held(self, weight_OI: Tensor, bias_O: Tensor | None) -> Product:
        if not self._pack:
            return lambda x: F.linear(x, weight_OI, bias_O)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR)
        return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, packed, bias_O, "none", [], "")


def _padded(bias_O: Tensor | None, ranks: int) -> Tensor | None:
    return None if bias_O is None else F.pad(bias_O, (0, ranks))


def merged_weight(weight_OI: Tensor, layer: LoraLayer, adapter: str) -> Tensor:
    """weight + scaling * B A, summed in float32 and rounded once to the weight's precision; [O, I]."""
    b_OR, a_RI = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
    return torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=layer.scaling[adapter]).to(weight_OI.dtype)


def can_pack(weight_OI: Tensor) -> bool:
    """oneDNN can pack it, and products with it keep their bits. In float32 they would not, and little would be gained."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def lora_layers(causal: nn.Module) -> list[tuple[nn.Module, str, LoraLayer]]:
    """All adapted linears, each with the module that holds it and its name there."""
    return [
        (parent, name, child)
        for parent in causal.modules()
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer)
    ]


def _joined(products: list[Product]) -> Product:
    return products[0] if len(products) == 1 else lambda x: torch.cat([product(x) for product in products], dim=-1)


def _merged(layer: nn.Module) -> Tensor:
    """The layer's weight, with its active adapter if it has one; [O, I]."""
    weight_OI = weight_of(base_of(layer))
    if not SideBySide(layer).adapters:
        return weight_OI
    (name,) = layer.active_adapters
    return merged_weight(weight_OI, layer, name)


def _is_cached(base: nn.Module) -> bool:
    return isinstance(base, FrozenLinear4bit) and base.cached_weight_OI is not None


class _Product(nn.Module):
    """Stands where an adapted linear stood. It has no parameters: nothing is trained, saved or counted through it."""

    def __init__(self, product: Product):
        super().__init__()
        self.forward = product.__call__  # a linear itself would be taken for a part of this module, and not be called


@contextlib.contextmanager
def replaced_linears(backbone: Backbone, linears: SamplingLinears) -> Iterator[None]:
    """The model's forward runs on the products instead of its adapted linears; put back after, whatever happens."""
    layers = lora_layers(backbone.causal)
    try:
        for parent, name, layer in layers:
            setattr(parent, name, _Product(linears.product(layer)))
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)
        linears.restore()
