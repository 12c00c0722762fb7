"""Decoding for the Llama family by few, large operations on a cache of fixed size.

A decode step of one token is short, so what surrounds its matrix products counts: transformers' forward builds masks,
grows its cache by copying it, and repeats keys for every query head. Here q, k, v and gate, up are one product each, a new
token is written into its column, the heads that share a key are rows of one product, and what can be done in place is.
tests/test_sampling.py holds it against transformers' forward: in bfloat16 on CPU it has the same bits.

Axes: B rows, U different prompts, P prompt columns, T tokens, C columns of the cache, A heads of queries, keys and values,
G query heads to a key head, D head size, H hidden, V vocabulary; N tokens of all rows, and inside attention rows x key heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from pipeline.backbone import Backbone, positions
from pipeline.blocks import SAME_BLOCK
from pipeline.cuda_graphs import TensorFunction
from pipeline.sampling_linears import Product, SamplingLinears

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of new tokens, [N, heads, D] each -> [N, heads x D]."""

Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with the sign of `rotate_half`; [N, 1, D] each."""

Record = Callable[..., TensorFunction]
"""A function and its arguments -> the same function, faster; see `pipeline.cuda_graphs.recorded`."""


def is_lean(causal: PreTrainedModel, columns: int) -> bool:
    """The model has the one block that is written here, and `columns` tokens lie inside its attention window."""
    window = getattr(causal.config, "sliding_window", None)
    blocks = getattr(causal.base_model, "layers", [])
    return bool(blocks) and all(type(block) in SAME_BLOCK for block in blocks) and (window is None or columns <= window)


@dataclass(frozen=True)
class Block:
    """One layer's modules, and its linears as products."""

    attention_norm: nn.Module
    qkv: Product
    out: Product
    mlp_norm: nn.Module
    gate_up: Product
    act: nn.Module
    down: Product


class LeanModel:
    """The weights that one rollout samples with."""

    def __init__(self, backbone: Backbone, linears: SamplingLinears):
        decoder, self.config = backbone.decoder, backbone.causal.config
        attention = decoder.layers[0].self_attn
        self.attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        self.attention_modules = [layer.self_attn for layer in decoder.layers]
        self.device, self.dtype = backbone.device, backbone.head_VH.dtype
        self.embed, self.rotary, self.norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self.head = linears.output_head(backbone.head_VH)
        self.key_heads: int = self.config.num_key_value_heads
        self.groups: int = attention.num_key_value_groups
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.blocks = [
            Block(
                layer.input_layernorm,
                linears.product(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                linears.product(layer.self_attn.o_proj),
                layer.post_attention_layernorm,
                linears.product(layer.mlp.gate_proj, layer.mlp.up_proj),
                layer.mlp.act_fn,
                linears.product(layer.mlp.down_proj),
            )
            for layer in decoder.layers
        ]

    def rotation(self, positions_BT: Tensor) -> Rotation:
        """Of the tokens at these positions, row after row."""
        cos_BTD, sin_BTD = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), position_ids=positions_BT)
        cos_N1D, sin_N1D = cos_BTD.flatten(0, 1)[:, None], sin_BTD.flatten(0, 1)[:, None]
        first, second = sin_N1D.chunk(2, dim=-1)
        return cos_N1D, torch.cat([-first, second], dim=-1)

    def run_(self, x_NH: Tensor, rotation: Rotation, attends: list[Attend]) -> None:
        """Embedded tokens become their hidden states, before the final norm, in place."""
        for block, attend in zip(self.blocks, attends, strict=True):
            heads_NAD = block.qkv(self._normed(block.attention_norm, x_NH)).view(len(x_NH), -1, self.head_size)
            x_NH += block.out(attend(*self._rotated(heads_NAD, *rotation)))
            gate, up = block.gate_up(self._normed(block.mlp_norm, x_NH)).chunk(2, dim=-1)
            x_NH += block.down(block.act(gate).mul_(up))

    def logits(self, x_BH: Tensor) -> Tensor:
        """Of the tokens that follow these hidden states; float32, [B, V]."""
        return self.head(self._normed(self.norm, x_BH)).float()

    @staticmethod
    def _normed(norm: nn.Module, x_NH: Tensor) -> Tensor:
        """What the module computes, by fewer calls."""
        return norm.weight * F.rms_norm(x_NH, x_NH.shape[-1:], eps=norm.variance_epsilon)

    def _rotated(self, heads_NAD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [N, heads, D] each: x * cos + rotate_half(x) * sin, whose sign lies in the sine."""
        qk, v = heads_NAD[:, : -self.key_heads], heads_NAD[:, -self.key_heads :]
        first, second = qk.chunk(2, dim=-1)
        qk = (qk * cos_N1D).add_(torch.cat([second, first], dim=-1).mul_(sin_N1D))
        return qk[:, : -self.key_heads], qk[:, -self.key_heads :], v


class LeanDecoder:
    """Decodes rows on one cache of fixed size. Rows that go leave holes, into which the last rows move."""

    def __init__(self, model: LeanModel, rows: int, columns: int, record: Record | None = None):
        """Room for `rows` rows of `columns` tokens, prompts included.

        record: makes a graph of a step: one for all rows, one for half of them, and so on; None runs it as it is.
        """
        self._model = model
        heads, size, dtype, device = model.key_heads, model.head_size, model.dtype, model.device
        self._keys, self._values = (
            [torch.zeros(rows, heads, columns, size, dtype=dtype, device=device) for _ in model.blocks]
            for _ in range(2)
        )
        self._bias_BC = torch.full((rows, columns), -torch.inf, dtype=dtype, device=device)
        self._positions_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._tokens_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._used = 0
        self._record = record
        self._graphs: dict[int, TensorFunction] = {}

    def start(self, tokens_UP: Tensor, mask_UP: Tensor, of_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        model, width = self._model, tokens_UP.shape[1]
        self._used = width
        positions_UP = positions(mask_UP)
        x_UPH = model.embed(tokens_UP)
        bias = create_causal_mask(model.config, x_UPH, mask_UP.long(), cache=None, position_ids=positions_UP)

        def attend(layer: int) -> Attend:
            def with_itself(*heads: Tensor) -> Tensor:
                q, k, v = (x.unflatten(0, tokens_UP.shape).transpose(1, 2) for x in heads)
                self._keys[layer][:, :, :width] = k[of_B]
                self._values[layer][:, :, :width] = v[of_B]
                attended = model.attention(model.attention_modules[layer], q, k, v, bias, scaling=model.scaling)[0]
                return attended.flatten(0, 1).flatten(1)

            return with_itself

        attends = [attend(layer) for layer in range(len(model.blocks))]
        model.run_(x_UPH.flatten(0, 1), model.rotation(positions_UP), attends)
        logits_UV = model.logits(x_UPH[:, -1].contiguous())
        self._bias_BC[:, :width].masked_fill_(mask_UP[of_B], 0)
        self._positions_B.copy_(mask_UP.sum(1)[of_B])
        return logits_UV[of_B]

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        rows = len(tokens_B)
        self._tokens_B[:rows] = tokens_B
        self._bias_BC[:, self._used] = 0
        column_1 = torch.tensor([self._used], device=tokens_B.device)
        self._used += 1
        if self._record is None:
            logits_BV = self._one_token(*self._inputs(rows), column_1)
        else:  # rows that have left are computed as well; what they give is not looked at
            size = min(size for size in halves(len(self._tokens_B)) if size >= rows)
            inputs = (*self._inputs(size), column_1)
            if size not in self._graphs:
                self._graphs[size] = self._record(self._one_token, *inputs)
            logits_BV = self._graphs[size](*inputs)[:rows]
        self._positions_B += 1
        return logits_BV

    def keep(self, going_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        going = going_B.tolist()
        count = sum(going)
        order = torch.arange(count)
        holes = [row for row in range(count) if not going[row]]
        movers = [row for row in range(count, len(going)) if going[row]]
        order[holes] = torch.tensor(movers, dtype=torch.long)
        for keys, values in zip(self._keys, self._values, strict=True):
            for cache in (keys, values):
                cache[holes, :, : self._used] = cache[movers, :, : self._used]
        for per_row in (self._bias_BC, self._positions_B):
            per_row[holes] = per_row[movers]
        return order.to(going_B.device)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._tokens_B[:rows], *self._model.rotation(self._positions_B[:rows, None])

    def _one_token(self, tokens_B: Tensor, cos_B1D: Tensor, sin_B1D: Tensor, column_1: Tensor) -> Tensor:
        """The tokens join the cache at the column.

        Products read the whole cache, whose free columns have a bias of -inf: a part of it would be copied for each of them.
        """
        model, rows = self._model, len(tokens_B)
        bias_N1C = self._bias_BC[:rows, None, None].expand(-1, model.key_heads, -1, -1).flatten(0, 1)

        def attend(keys_BKCD: Tensor, values_BKCD: Tensor) -> Attend:
            keys_NDC, values_NCD = keys_BKCD.flatten(0, 1).mT, values_BKCD.flatten(0, 1)

            def with_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys_BKCD.index_copy_(2, column_1, k[:, :, None])
                values_BKCD.index_copy_(2, column_1, v[:, :, None])
                scores_NGC = torch.bmm(q.reshape(-1, model.groups, model.head_size), keys_NDC)
                scores_NGC.mul_(model.scaling).add_(bias_N1C)
                weights_NGC = scores_NGC.softmax(-1, dtype=torch.float32).to(q.dtype)
                return torch.bmm(weights_NGC, values_NCD).view(rows, -1)

            return with_cache

        attends = [attend(keys[:rows], values[:rows]) for keys, values in zip(self._keys, self._values, strict=True)]
        x_BH = model.embed(tokens_B)
        model.run_(x_BH, (cos_B1D, sin_B1D), attends)
        return model.logits(x_BH)


def halves(rows: int) -> list[int]:
    """For how many rows a step is recorded: all, half of them (rounded up), down to one.

    halves(6) -> [6, 3, 2, 1]
    """
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes
