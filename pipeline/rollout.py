"""Beat 1: prompts -> sampled answers, by pure sampling with keyed noise and a key-value cache.

Axes: B batch (rows that are still being sampled), U different prompts among them, P prompt columns, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import ranks
from pipeline.batch import Rollout, pad_rows
from pipeline.data.examples import Prompt, sequences
from pipeline.data.tokenization import ChatTokenizer
from pipeline.out_of_memory import ROLLOUT_CHUNK
from pipeline.params.runtime import RuntimeParams
from pipeline.randomness import uniforms
from pipeline.roles import Policy
from pipeline.sampler import OpenDecoder, decoding
from pipeline.sharding import whole

BLOCK = 256  # tokens per block of the vocabulary, see invert_cdf


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: from the whole distribution (no top-k, top-p, penalties or minimum length), at the policy's temperature.

    samples: answers to each prompt; the prompt is read once.
    weights: merged: the adapter is added to the weights, which is faster and rounds them once more.
    decoder, cuda_graphs: as in section `runtime`.
    greedy: the likeliest token instead; for reading, never for training.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    chunk: int
    seed: int
    samples: int = 1
    weights: Literal["adapter", "merged"] = "adapter"
    decoder: Literal["auto", "transformers", "lean"] = "auto"
    cuda_graphs: bool = False
    greedy: bool = False


def sampling_of(tokenizer: ChatTokenizer, runtime: RuntimeParams, seed: int) -> Sampling:
    """One answer to each prompt, ended and cut where the tokenizer says."""
    return Sampling(
        tokenizer.max_response,
        tokenizer.stop_ids,
        runtime.rollout_chunk,
        seed,
        decoder=runtime.decoder,
        cuda_graphs=runtime.cuda_graphs,
    )


def generate(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Rollout:
    """`sampling.samples` answers to each prompt, in the prompts' order; those to one prompt are neighbours.

    An answer ends with a stop token, which belongs to it, or is truncated at `max_new_tokens`. Every answer has at least
    one token; a stop token alone is a legal answer of length 1. Where memory runs out, chunks are halved.
    Of several processes each samples its own share, and all get the whole.
    """
    return ROLLOUT_CHUNK.fit(
        sampling.chunk, lambda chunk: _generate(policy, prompts, replace(sampling, chunk=chunk), step)
    )


def _generate(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Rollout:
    answers: list[list[int]] = []
    logprobs: list[list[float]] = []
    asked = [(prompt, sample) for prompt in prompts for sample in range(sampling.samples)]
    columns = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
    merge, decoder = sampling.weights == "merged", sampling.decoder
    with (
        whole(policy.backbone.decoder),
        decoding(policy.backbone, policy.adapter, merge, decoder, sampling.cuda_graphs, columns) as open_decoder,
    ):
        mine = ranks.block(asked)
        for start in range(0, len(mine), sampling.chunk):
            chunk = mine[start : start + sampling.chunk]
            ids, chunk_logprobs = generate_chunk(policy, chunk, sampling, step, open_decoder)
            answers += ids
            logprobs += chunk_logprobs
    answers, logprobs = (
        list(chain.from_iterable(parts)) for parts in zip(*ranks.gather((answers, logprobs)), strict=True)
    )
    rows = sequences([(prompt.ids, answer) for (prompt, _), answer in zip(asked, answers, strict=True)])
    stops = set(sampling.stop_ids)
    return Rollout(
        tokens_BT=rows.tokens_BT,
        prompt_lengths_B=rows.prompt_lengths_B,
        response_lengths_B=rows.response_lengths_B,
        behaviour_logprobs_BR=pad_rows(logprobs, torch.float32),
        truncated_B=torch.tensor([answer[-1] not in stops for answer in answers]),
        prompt_ids_B=torch.tensor([prompt.key for prompt, _ in asked]),
    )


def generate_chunk(
    policy: Policy, asked: Sequence[tuple[Prompt, int]], sampling: Sampling, step: int, open_decoder: OpenDecoder
) -> tuple[list[list[int]], list[list[float]]]:
    """Answers to pairs of prompt and sample index, all decoded together, and their tokens' log-probabilities."""
    device = policy.device
    stop_ids = torch.tensor(sampling.stop_ids, device=device)
    answers: list[list[int]] = [[] for _ in asked]
    logprobs: list[list[float]] = [[] for _ in asked]
    alive = list(range(len(asked)))  # rows of this chunk that are still in the batch
    tokens_UP, mask_UP, of_B = (x.to(device) for x in left_padded([prompt.ids for prompt, _ in asked]))
    decoder = open_decoder(len(asked), tokens_UP.shape[1] + sampling.max_new_tokens)
    logits_BV = decoder.start(tokens_UP, mask_UP, of_B)
    for token in range(sampling.max_new_tokens):
        ranks.poll()
        logprobs_BV = torch.log_softmax(logits_BV / policy.temperature, dim=-1)
        if sampling.greedy:
            next_B = logprobs_BV.argmax(-1)
        else:
            keys = [(asked[row][0].key, asked[row][1]) for row in alive]
            next_B = invert_cdf(logprobs_BV.exp(), uniforms(sampling.seed, step, keys, token).to(device))
        chosen_B = logprobs_BV.gather(1, next_B[:, None]).squeeze(1)
        for row, token_id, logprob in zip(alive, next_B.tolist(), chosen_B.tolist(), strict=True):
            answers[row].append(token_id)
            logprobs[row].append(logprob)
        going_B = ~torch.isin(next_B, stop_ids)
        if not going_B.any() or token + 1 == sampling.max_new_tokens:
            break
        if not going_B.all():  # finished rows leave the batch
            kept = decoder.keep(going_B)
            next_B = next_B[kept]
            alive = [alive[place] for place in kept.tolist()]
        logits_BV = decoder.step(next_B)
    return answers, logprobs


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Each different row once, padded on the left, so that the next token of every row is the next column of the cache.

    Returns:
        ids [U, P], their mask, and which of them each row is [B].
    """
    places: dict[tuple[int, ...], int] = {}
    of_B = torch.tensor([places.setdefault(tuple(row), len(places)) for row in rows])
    width = max(map(len, places))
    tokens_UP = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in places])
    mask_UP = torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in places])
    return tokens_UP, mask_UP, of_B


def invert_cdf(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token at which the running sum of probabilities passes the row's number in [0, 1); never one of probability 0.

    Sums run in float64: in float32 the tail of a large vocabulary would be lost. They run in two steps, over blocks and
    inside one block, by products with triangles of ones: that is faster than a running sum over the vocabulary, and
    torch has no deterministic one on CUDA.
    """
    rows, vocabulary = probabilities_BV.shape
    padded_BV = F.pad(probabilities_BV, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else probabilities_BV
    blocks_BNK = padded_BV.view(rows, -1, BLOCK)
    upto_BN = _running_sum(blocks_BNK.sum(-1, dtype=torch.float64))
    targets_B1 = uniforms_B[:, None] * upto_BN[:, -1:]
    last_block_B1 = (upto_BN < upto_BN[:, -1:]).sum(1, keepdim=True)  # the last in which anything is possible
    block_B1 = torch.minimum((upto_BN <= targets_B1).sum(1, keepdim=True), last_block_B1)
    before_B1 = torch.where(block_B1 > 0, upto_BN.gather(1, (block_B1 - 1).clamp(min=0)), 0)
    inside_BK = blocks_BNK[torch.arange(rows, device=block_B1.device), block_B1.squeeze(1)].double()
    possible_BK = inside_BK > 0
    passed_BK = possible_BK & (before_B1 + _running_sum(inside_BK) > targets_B1)
    # where rounding lets no token of the block pass, the last possible one of the block is it
    last_B = (possible_BK * torch.arange(BLOCK, device=block_B1.device)).argmax(1)
    token_B = torch.where(passed_BK.any(1), passed_BK.int().argmax(1), last_B)
    return block_B1.squeeze(1) * BLOCK + token_B


def _running_sum(x_BN: Tensor) -> Tensor:
    return x_BN @ torch.ones(x_BN.shape[1], x_BN.shape[1], dtype=x_BN.dtype, device=x_BN.device).triu()
