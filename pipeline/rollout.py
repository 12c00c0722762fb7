"""Beat 1: prompts -> sampled answers, by pure sampling with keyed noise and a key-value cache.

Axes: B batch (rows that are still being sampled), P prompt columns, S all columns so far, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from pipeline import interruption
from pipeline.batch import Rollout, pad_rows
from pipeline.data.examples import Prompt, sequences
from pipeline.out_of_memory import ROLLOUT_CHUNK
from pipeline.randomness import uniforms
from pipeline.roles import Policy

BLOCK = 256  # tokens per block of the vocabulary, see invert_cdf


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: from the whole distribution (no top-k, top-p, penalties or minimum length), at the policy's temperature.

    samples: answers to each prompt.
    greedy: the likeliest token instead; for reading, never for training.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    chunk: int
    seed: int
    samples: int = 1
    greedy: bool = False


def generate(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Rollout:
    """`sampling.samples` answers to each prompt, in the prompts' order; those to one prompt are neighbours.

    An answer ends with a stop token, which belongs to it, or is truncated at `max_new_tokens`. Every answer has at least
    one token; a stop token alone is a legal answer of length 1. Where memory runs out, chunks are halved.
    """
    return ROLLOUT_CHUNK.fit(
        sampling.chunk, lambda chunk: _generate(policy, prompts, replace(sampling, chunk=chunk), step)
    )


def _generate(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Rollout:
    answers: list[list[int]] = []
    logprobs: list[list[float]] = []
    asked = [(prompt, sample) for prompt in prompts for sample in range(sampling.samples)]
    for start in range(0, len(asked), sampling.chunk):
        chunk = asked[start : start + sampling.chunk]
        ids, chunk_logprobs = _generate_chunk(policy, chunk, sampling, step)
        answers += ids
        logprobs += chunk_logprobs
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


def _generate_chunk(
    policy: Policy, asked: Sequence[tuple[Prompt, int]], sampling: Sampling, step: int
) -> tuple[list[list[int]], list[list[float]]]:
    prompts = [prompt for prompt, _ in asked]
    backbone = policy.backbone
    device = backbone.device
    stop_ids = torch.tensor(sampling.stop_ids, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))  # rows of this chunk that are still in the batch
    width = max(len(prompt.ids) for prompt in prompts)
    # padded on the left, so that the next token of every row is the next column of the cache
    tokens_BP = torch.tensor([[0] * (width - len(prompt.ids)) + prompt.ids for prompt in prompts], device=device)
    mask_BS = torch.tensor(
        [[False] * (width - len(prompt.ids)) + [True] * len(prompt.ids) for prompt in prompts], device=device
    )
    cache = DynamicCache(config=backbone.causal.config)
    backbone.activate(policy.adapter)
    with backbone.inference():
        logits_BV = backbone.decode(tokens_BP, mask_BS, cache)
        for token in range(sampling.max_new_tokens):
            interruption.poll()
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
                kept = going_B.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                next_B, mask_BS = next_B[kept], mask_BS[kept]
                alive = [alive[place] for place in kept.tolist()]
            mask_BS = torch.cat([mask_BS, torch.ones_like(mask_BS[:, :1])], dim=1)
            logits_BV = backbone.decode(next_B[:, None], mask_BS, cache)
    return answers, logprobs


def invert_cdf(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token at which the running sum of probabilities passes the row's number in [0, 1); never one of probability 0.

    Sums run in float64: in float32 the tail of a large vocabulary would be lost. They run in two steps, over blocks and
    inside one block, by products with triangles of ones: that is faster than a running sum over the vocabulary, and
    torch has no deterministic one on CUDA.
    """
    rows, vocabulary = probabilities_BV.shape
    padded_BV = F.pad(probabilities_BV.double(), (0, -vocabulary % BLOCK))
    blocks_BNK = padded_BV.view(rows, -1, BLOCK)
    upto_BN = _running_sum(blocks_BNK.sum(-1))
    targets_B1 = uniforms_B[:, None] * upto_BN[:, -1:]
    last_block_B1 = (upto_BN < upto_BN[:, -1:]).sum(1, keepdim=True)  # the last in which anything is possible
    block_B1 = torch.minimum((upto_BN <= targets_B1).sum(1, keepdim=True), last_block_B1)
    before_B1 = torch.where(block_B1 > 0, upto_BN.gather(1, (block_B1 - 1).clamp(min=0)), 0)
    inside_BK = blocks_BNK[torch.arange(rows, device=block_B1.device), block_B1.squeeze(1)]
    possible_BK = inside_BK > 0
    passed_BK = possible_BK & (before_B1 + _running_sum(inside_BK) > targets_B1)
    # where rounding lets no token of the block pass, the last possible one of the block is it
    last_B = (possible_BK * torch.arange(BLOCK, device=block_B1.device)).argmax(1)
    token_B = torch.where(passed_BK.any(1), passed_BK.int().argmax(1), last_B)
    return block_B1.squeeze(1) * BLOCK + token_B


def _running_sum(x_BN: Tensor) -> Tensor:
    return x_BN @ torch.ones(x_BN.shape[1], x_BN.shape[1], dtype=x_BN.dtype, device=x_BN.device).triu()
