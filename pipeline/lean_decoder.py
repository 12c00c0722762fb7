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

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from pipeline.backbone import Backbone, positions
from pipeline.sampling_linears import Product, SamplingLinears

SAME_BLOCK = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of new tokens, [B, heads, T, D] -> [B, T, heads x D]."""


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
        decoder = backbone.decoder
        attention = decoder.layers[0].self_attn
        self.device, self.dtype = backbone.device, backbone.head_VH.dtype
        self.embed, self.rotary, self.norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self.head = linears.output_head(backbone.head_VH)
        self.key_heads: int = backbone.causal.config.num_key_value_heads
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

    def logits(self, tokens_BT: Tensor, rotation: tuple[Tensor, Tensor], attend: list[Attend]) -> Tensor:
        """Logits of the token after the last one; float32, [B, V]."""
        x_BTH = self.embed(tokens_BT)
        for block, attend_here in zip(self.blocks, attend, strict=True):
            x_BTH = self._block(block, x_BTH, rotation, attend_here)
        return self.head(self.norm(x_BTH[:, -1].contiguous())).float()

    def _block(self, block: Block, x_BTH: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query_heads, cos_B1TD, sin_B1TD = self.key_heads * self.groups, *(x_BTD[:, None] for x_BTD in rotation)
        qkv = block.qkv(block.attention_norm(x_BTH)).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        qk, v = qkv.split([query_heads + self.key_heads, self.key_heads], dim=1)
        q, k = (qk * cos_B1TD + rotate_half(qk) * sin_B1TD).split([query_heads, self.key_heads], dim=1)
        x_BTH = x_BTH + block.out(attend(q, k, v))
        gate, up = block.gate_up(block.mlp_norm(x_BTH)).chunk(2, dim=-1)
        return x_BTH + block.down(block.act(gate) * up)


class LeanDecoder:
    """Decodes rows on one cache of fixed size. Rows that go leave a hole, into which the last row moves."""

    def __init__(self, model: LeanModel, rows: int, columns: int):
        """Room for `rows` rows of `columns` tokens, prompts included."""
        self._model = model
        self._rows = rows
        heads, size, dtype, device = model.key_heads, model.head_size, model.dtype, model.device
        # keys lie transposed: the product with a query then reads them as they lie
        self._keys = [torch.zeros(rows, heads, size, columns, dtype=dtype, device=device) for _ in model.blocks]
        self._values = [torch.zeros(rows, heads, columns, size, dtype=dtype, device=device) for _ in model.blocks]
        self._bias_BC = torch.full((rows, columns), -torch.inf, dtype=dtype, device=device)
        self._positions_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._used = 0

    def start(self, tokens_UP: Tensor, mask_UP: Tensor, of_B: Tensor) -> Tensor:
        """Reads each prompt once, left-padded; row b answers prompt of_B[b]. Logits of the rows' first tokens, [B, V]."""
        width = self._used = tokens_UP.shape[1]
        causal_PP = torch.ones(width, width, dtype=torch.bool, device=mask_UP.device).tril()
        # padding sees itself, so that no row of the softmax is empty
        seen_U1PP = (causal_PP & mask_UP[:, None, :] | torch.eye(width, device=mask_UP.device).bool())[:, None]

        def attend(layer: int) -> Attend:
            def with_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                self._keys[layer][..., :width] = k.transpose(2, 3)[of_B]
                self._values[layer][:, :, :width] = v[of_B]
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen_U1PP, scale=self._model.scaling, enable_gqa=True
                )
                return out.transpose(1, 2).flatten(2)

            return with_itself

        rotation = self._model.rotation(positions(mask_UP))
        logits_UV = self._model.logits(tokens_UP, rotation, [attend(n) for n in range(len(self._model.blocks))])
        self._bias_BC[:, :width].masked_fill_(mask_UP[of_B], 0)
        self._positions_B.copy_(mask_UP.sum(1)[of_B])
        return logits_UV[of_B]

    def step(self, tokens_B: Tensor) -> Tensor:
        """The rows' new tokens join the cache. Logits of the next ones, [B, V]."""
        rows = len(tokens_B)
        self._bias_BC[:, self._used] = 0
        rotation = self._model.rotation(self._positions_B[:rows, None])
        column = torch.tensor([self._used], device=tokens_B.device)
        self._used += 1
        self._positions_B += 1
        return self._one_token(tokens_B, rotation, column, self._used)

    def keep(self, going_B: Tensor) -> Tensor:
        """Rows where it is False leave. Where each of the others was before, in their order from now on."""
        going = going_B.tolist()
        count = sum(going)
        holes = [row for row in range(count) if not going[row]]
        movers = [row for row in range(count, len(going)) if going[row]]
        for tensors, used in ((self._keys, (..., slice(self._used))), (self._values, (slice(None), slice(self._used)))):
            for tensor in tensors:
                for hole, mover in zip(holes, movers, strict=True):
                    tensor[hole][used] = tensor[mover][used]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        order_B = torch.tensor(order, device=going_B.device)
        self._bias_BC[:count] = self._bias_BC[order_B]
        self._positions_B[:count] = self._positions_B[order_B]
        return order_B

    def _one_token(self, tokens_B: Tensor, rotation: tuple[Tensor, Tensor], column: Tensor, width: int) -> Tensor:
        rows = len(tokens_B)
        model = self._model
        bias_N1S = self._bias_BC[:rows, None, None, :width].expand(-1, model.key_heads, -1, -1).flatten(0, 1)

        def attend(keys: Tensor, values: Tensor) -> Attend:
            keys_NDC, values_NCD = keys[:rows].flatten(0, 1), values[:rows].flatten(0, 1)

            def with_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys_NDC.index_copy_(2, column, k.reshape(-1, model.head_size, 1))
                values_NCD.index_copy_(1, column, v.reshape(-1, 1, model.head_size))
                q_NGD = q.reshape(-1, model.groups, model.head_size)
                scores_NGS = torch.baddbmm(bias_N1S, q_NGD, keys_NDC[..., :width], alpha=model.scaling)
                weights_NGS = scores_NGS.softmax(-1, dtype=torch.float32).to(q.dtype)
                return (weights_NGS @ values_NCD[:, :width]).view(rows, 1, -1)

            return with_cache

        attends = [attend(keys, values) for keys, values in zip(self._keys, self._values, strict=True)]
        return model.logits(tokens_B[:, None], rotation, attends)
