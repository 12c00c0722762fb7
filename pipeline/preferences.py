"""Preference pairs under a policy and its reference: what DPO learns from.

Axes: B pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.backbone import Backbone
from pipeline.batch import Pairs, map_rows
from pipeline.randomness import permutation
from pipeline.roles import Policy


@dataclass(frozen=True)
class ReferencedPairs(Pairs):
    """Pairs with the reference's log-probability of each whole answer, in nats; float32, without gradient, [B] each."""

    ref_chosen_B: Tensor
    ref_rejected_B: Tensor


@dataclass
class PairPolicy:
    """A policy as a model of pairs."""

    policy: Policy

    @property
    def backbone(self) -> Backbone:
        """The policy's."""
        return self.policy.backbone

    @property
    def device(self) -> torch.device:
        """The policy's."""
        return self.policy.device

    def __call__(self, batch: Pairs) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the whole chosen and rejected answers, in nats; float32, [B] each."""
        return self.policy(batch.chosen).logprobs_BR.sum(1), self.policy(batch.rejected).logprobs_BR.sum(1)

    def logprobs_all(
        self, pairs: Pairs, microbatch_tokens: int, minibatch_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for any number of pairs, in eval mode and without gradient; on the CPU. For the sizes see `map_rows`."""
        with self.backbone.inference():
            chosen_B, rejected_B = map_rows(self, pairs, microbatch_tokens, minibatch_size)
        return chosen_B, rejected_B


def with_reference(
    pairs: Pairs, reference: Policy, batch_size: int, seed: int, microbatch_tokens: int
) -> ReferencedPairs:
    """The pairs with what `reference` says of them, asked once, before training.

    In passes of the shape that those of `epochs_of`'s first epoch have, seed and batch size being the same: as long as
    policy and reference have equal weights, an implicit reward is exactly 0 there, in bfloat16 too.
    """
    order_B = permutation(len(pairs), seed, epoch=0)
    in_order = PairPolicy(reference).logprobs_all(pairs.select(order_B), microbatch_tokens, batch_size)
    chosen_B, rejected_B = (logprobs_B[order_B.argsort()] for logprobs_B in in_order)
    return ReferencedPairs(pairs.chosen, pairs.rejected, chosen_B, rejected_B)


def implicit_gaps(policy: Policy, reference: Policy, pairs: Pairs, beta: float, microbatch_tokens: int) -> Tensor:
    """Implicit reward of the chosen less that of the rejected answer, without gradient; [B]."""
    chosen_B, rejected_B = PairPolicy(policy).logprobs_all(pairs, microbatch_tokens)
    ref_chosen_B, ref_rejected_B = PairPolicy(reference).logprobs_all(pairs, microbatch_tokens)
    return beta * ((chosen_B - ref_chosen_B) - (rejected_B - ref_rejected_B))
