"""Who decodes: transformers' forward or the lean decoder, on which weights. `decoding` opens the one that is asked for.

Axes: B rows, U different prompts, P prompt columns, S columns so far, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.backbone import Backbone
from pipeline.cuda_graphs import recorded
from pipeline.lean_decoder import LeanDecoder, LeanModel, is_lean
from pipeline.sampling_linears import Product, SamplingLinears, replaced_linears


class Decoder(Protocol):
    """Rows that grow by one token at a time."""

    def start(self, tokens_UP: Tensor, mask_UP: Tensor, of_B: Tensor) -> Tensor:
        """Reads each prompt once, left-padded; row b answers prompt of_B[b]. Logits of the rows' first tokens; float32, [B, V]."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """The rows' new tokens join the cache. Logits of the next ones; float32, [B, V]."""

    def keep(self, going_B: Tensor) -> Tensor:
        """Rows where it is False leave. Where each of the others was before, in their order from now on."""


OpenDecoder = Callable[[int, int], Decoder]
"""Rows, and columns for a prompt with its answer -> a decoder with an empty cache."""


class TransformersDecoder:
    """Any causal model, by transformers' own forward."""

    def __init__(self, backbone: Backbone, head: Product):
        self._backbone = backbone
        self._head = head
        self._cache = DynamicCache(config=backbone.causal.config)

    def start(self, tokens_UP: Tensor, mask_UP: Tensor, of_B: Tensor) -> Tensor:
        """As in `Decoder`."""
        self._mask_BS = mask_UP
        logits_UV = self._logits(tokens_UP)
        if len(of_B) == len(tokens_UP):
            return logits_UV
        self._cache.batch_select_indices(of_B)
        self._mask_BS = mask_UP[of_B]
        return logits_UV[of_B]

    def step(self, tokens_B: Tensor) -> Tensor:
        """As in `Decoder`."""
        self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._mask_BS[:, :1])], dim=1)
        return self._logits(tokens_B[:, None])

    def keep(self, going_B: Tensor) -> Tensor:
        """As in `Decoder`."""
        kept_B = going_B.nonzero().squeeze(1)
        self._cache.batch_select_indices(kept_B)
        self._mask_BS = self._mask_BS[kept_B]
        return kept_B

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        return self._head(self._backbone.decode(tokens_BT, self._mask_BS, self._cache)).float()


@contextlib.contextmanager
def decoding(
    backbone: Backbone, adapter: str | None, merge: bool, decoder: str, cuda_graphs: bool, columns: int
) -> Iterator[OpenDecoder]:
    """Eval mode without gradients, and the weights to sample with; all as before after it, whatever happens.

    Args:
        merge: the adapter is merged into the weights.
        decoder, cuda_graphs: as in section `runtime`.
        columns: the most tokens that a prompt and its answer may have.
    """
    lean = decoder == "lean" or (decoder == "auto" and backbone.head_VH.dtype == torch.bfloat16)
    backbone.activate(adapter)
    with backbone.inference():
        linears = SamplingLinears(backbone, merge)
        if lean and is_lean(backbone.causal, columns):
            try:
                model = LeanModel(backbone, linears)
                # a recorded step cannot make a weight anew
                record = recorded if cuda_graphs and backbone.device.type == "cuda" and not linears.fresh else None
                yield lambda rows, columns: LeanDecoder(model, rows, columns, record)
            finally:
                linears.restore()
        else:
            with replaced_linears(backbone, linears):
                head = linears.output_head(backbone.head_VH)
                yield lambda rows, columns: TransformersDecoder(backbone, head)
