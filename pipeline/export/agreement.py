"""Does the merged model say what the adapter said? Greedy answers one by one, and KL over whole distributions.

Axes: B rows, N response tokens counted one by one, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batch import Rollout, Sequences, microbatches
from pipeline.data.examples import Prompt
from pipeline.errors import BaseModelError
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate

LARGEST_KL = {torch.float32: 1e-6, torch.bfloat16: 0.01}
"""Nats per token, mean: what a merged model may be away from the adapter. bfloat16 rounds the sum of base and adapter
to 8 bits, where an adapter beside its base is not rounded together with it."""


@dataclass(frozen=True)
class Said:
    """A policy's greedy answers, and the hidden states from which each of their tokens was chosen; [N, H]."""

    answers: Rollout
    states_NH: Tensor


@dataclass(frozen=True)
class Agreement:
    """same: greedy answers that are equal token by token, of `prompts`. kl: nats per token, mean over `tokens`."""

    same: int
    prompts: int
    kl: float
    tokens: int
    largest_kl: float

    def __str__(self) -> str:
        return (
            f"{self.same} of {self.prompts} greedy answers are the same token by token; KL to the adapter is {self.kl:.2g} nats "
            f"per token, mean over {self.tokens} tokens (at most {self.largest_kl:g})"
        )

    def check(self) -> None:
        """Raises:
        BaseModelError: the merged model is further away than rounding explains.
        """
        if not self.kl <= self.largest_kl:
            raise BaseModelError(f"The merged model is not the adapter's: {self}; nothing is exported.")


def greedy_answers(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling, microbatch_tokens: int) -> Said:
    """What the policy says."""
    answers = generate(policy, prompts, sampling, step=0)
    return Said(answers, response_states(policy, answers, microbatch_tokens))


@torch.no_grad()
def response_states(policy: Policy, batch: Sequences, microbatch_tokens: int) -> Tensor:
    """Hidden states before each response token, row by row, on the CPU; [N, H]."""
    backbone = policy.backbone
    backbone.activate(policy.adapter)
    states: dict[int, Tensor] = {}
    with backbone.inference():
        for rows, part in microbatches(batch, microbatch_tokens):
            part = part.to(backbone.device)
            hidden_BTH = backbone.hidden(part.tokens_BT, part.attention_mask_BT)
            starts, lengths = (part.prompt_lengths_B - 1).tolist(), part.response_lengths_B.tolist()
            for row, row_TH, start, length in zip(rows.tolist(), hidden_BTH.cpu(), starts, lengths, strict=True):
                states[row] = row_TH[start : start + length]
    return torch.cat([states[row] for row in range(len(batch))])


def agreement(said: Said, again: Said, states_NH: Tensor, head_VH: Tensor, chunk: int) -> Agreement:
    """The merged model's own answers beside the adapter's, and its `states_NH` over the adapter's answers."""
    head_VH = head_VH.cpu()
    pairs = zip(said.states_NH.split(chunk), states_NH.split(chunk), strict=True)
    kl = sum(float(kl_of(F.linear(one, head_VH), F.linear(other, head_VH)).sum()) for one, other in pairs)
    tokens = len(states_NH)
    same = sum(map(torch.equal, _rows(said.answers), _rows(again.answers)))
    return Agreement(same, len(said.answers), kl / tokens, tokens, LARGEST_KL[head_VH.dtype])


def kl_of(logits_NV: Tensor, other_NV: Tensor) -> Tensor:
    """KL(softmax(logits) || softmax(other)) in float64, where rounding does not drown a small one; [N]."""
    logprobs_NV, others_NV = (logits.double().log_softmax(-1) for logits in (logits_NV, other_NV))
    return (logprobs_NV.exp() * (logprobs_NV - others_NV)).sum(-1)


def _rows(batch: Sequences) -> list[Tensor]:
    lengths = batch.response_lengths_B.tolist()
    return [ids[:length] for ids, length in zip(batch.response_ids_BR, lengths, strict=True)]
