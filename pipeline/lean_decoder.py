"""Decoding for the Llama family by few, large operations on a cache of fixed size.

A decode step of one token is short, so what surrounds its matrix products counts: transformers' forward builds masks,
grows its cache by copying it, and repeats keys for every query head. Here q, k, v and gate, up are one product each, a new
token is written into its column, and the heads that share a key are rows of one product. The model's own modules do norms,
rotation and activation. tests/test_lean_decoder.py holds it against transformers' forward.

Axes: B rows, U different prompts, T tokens, C columns of the cache, S those in use, N rows x key heads, G query heads to a
key head, D head size, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward, rotate_half

from pipeline.backbone import Backbone, positions
from pipeline.blocks import SAME_BLOCK
from pipeline.cuda_graphs import TensorFunction
from pipeline.sampling_linears import Product, SamplingLinears

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of new tokens, [B, heads, T, D] -> [B, T, heads x D]."""

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

    attention_norm: Product
    qkv: Product
    out: Product
    mlp_norm: Product
    gate_up: Product
    act: Product
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

    def rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions; [B, T, D] each."""
        return self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), position_ids=positions_BT)

    def logits(self, x_BTH: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, attends: list[Attend]) -> Tensor:
        """Embedded tokens -> logits of the token after the last one; float32, [B, V]."""
        for block, attend in zip(self.blocks, attends, strict=True):
            x_BTH = self._block(block, x_BTH, cos_BTD[:, None], sin_BTD[:, None], attend)
        return self.head(self.norm(x_BTH[:, -1].contiguous())).float()

    def _block(self, block: Block, x_BTH: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor, attend: Attend) -> Tensor:
        query_heads = self.key_heads * self.groups
        qkv = block.qkv(block.attention_norm(x_BTH)).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        qk, v = qkv.split([query_heads + self.key_heads, self.key_heads], dim=1)
        q, k = (qk * cos_B1TD + rotate_half(qk) * sin_B1TD).split([query_heads, self.key_heads], dim=1)
        x_BTH = x_BTH + block.out(attend(q, k, v))
        gate, up = block.gate_up(block.mlp_norm(x_BTH)).chunk(2, dim=-1)
        return x_BTH + block.down(block.act(gate) * up)


class LeanDecoder:
    """Decodes rows on one cache of fixed size. Rows that go leave holes, into which the last rows move."""

    def __init__(self, model: LeanModel, rows: int, columns: int, record: Record | None = None):
        """Room for `rows` rows of `columns` tokens, prompts included.

        record: makes a graph of a step: one for all rows, one for half of them, and so on; None runs it as it is.
        """
        self._model = model
        heads, size, dtype, device = model.key_heads, model.head_size, model.dtype, model.device
        # keys lie transposed: the product with a query then reads them as they lie
        self._keys = [torch.zeros(rows, heads, size, columns, dtype=dtype, device=device) for _ in model.blocks]
        self._values = [torch.zeros(rows, heads, columns, size, dtype=dtype, device=device) for _ in model.blocks]
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
            def with_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                self._keys[layer][..., :width] = k.transpose(2, 3)[of_B]
                self._values[layer][:, :, :width] = v[of_B]
                return model.attention(model.attention_modules[layer], q, k, v, bias, scaling=model.scaling)[0].flatten(
                    2
                )

            return with_itself

        attends = [attend(layer) for layer in range(len(model.blocks))]
        logits_UV = model.logits(x_UPH, *model.rotation(positions_UP), attends)
        self._bias_BC[:, :width].masked_fill_(mask_UP[of_B], 0)
        self._positions_B.copy_(mask_UP.sum(1)[of_B])
        return logits_UV[of_B]

    def step(self, tokens_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        rows = len(tokens_B)
        self._tokens_B[:rows] = tokens_B
        self._bias_BC[:, self._used] = 0
        column_1 = torch.tensor([self._used], device=tokens_B.device)
        self._used += 1
        if self._record is None:
            logits_BV = self._one_token(self._used, *self._inputs(rows), column_1)
        else:  # rows that have left are computed as well; what they give is not looked at
            size = min(size for size in halves(len(self._tokens_B)) if size >= rows)
            inputs = (*self._inputs(size), column_1)
            if size not in self._graphs:
                self._graphs[size] = self._record(partial(self._one_token, self._bias_BC.shape[1]), *inputs)
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
            keys[holes, :, :, : self._used] = keys[movers, :, :, : self._used]
            values[holes, :, : self._used] = values[movers, :, : self._used]
        for per_row in (self._bias_BC, self._positions_B):
            per_row[holes] = per_row[movers]
        return order.to(going_B.device)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._tokens_B[:rows], *self._model.rotation(self._positions_B[:rows, None])

    def _one_token(self, width: int, tokens_B: Tensor, cos_B1D: Tensor, sin_B1D: Tensor, column_1: Tensor) -> Tensor:
        """The tokens join the cache at the column; `width` columns are looked at, those not in use through a bias of -inf."""
        model, rows = self._model, len(tokens_B)
        bias_N1S = self._bias_BC[:rows, None, None, :width].expand(-1, model.key_heads, -1, -1).flatten(0, 1)

        def attend(keys: Tensor, values: Tensor) -> Attend:
            keys_NDC, values_NCD = keys[:rows].flatten(0, 1), values[:rows].flatten(0, 1)

            def with_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys_NDC.index_copy_(2, column_1, k.reshape(-1, model.head_size, 1))
                values_NCD.index_copy_(1, column_1, v.reshape(-1, 1, model.head_size))
                q_NGD = q.reshape(-1, model.groups, model.head_size)
                scores_NGS = (q_NGD @ keys_NDC[..., :width]) * model.scaling + bias_N1S
                weights_NGS = scores_NGS.softmax(-1, dtype=torch.float32).to(q.dtype)
                return (weights_NGS @ values_NCD[:, :width]).view(rows, 1, -1)

            return with_cache

        attends = [attend(keys, values) for keys, values in zip(self._keys, self._values, strict=True)]
        return model.logits(model.embed(tokens_B[:, None]), cos_B1D, sin_B1D, attends)


def halves(rows: int) -> list[int]:
    """For how many rows a step is recorded: all, half of them (rounded up), down to one.

    halves(6) -> [6, 3, 2, 1]
    """
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes
