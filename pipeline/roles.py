"""The four roles of RLHF as thin views of one backbone: policy with its value head, reference, reward model.

Axes: B batch, R response tokens, N response tokens counted one by one, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.backbone import Backbone
from pipeline.batch import Pairs, Rollout, Sequences, map_rows
from pipeline.heads import ScalarHead
from pipeline.tensors import token_logprobs, token_logprobs_and_entropies


@dataclass(frozen=True)
class PolicyOutput:
    """Response tokens' log-probabilities and the values of the states before them, both 0 at padding; float32, [B, R]."""

    logprobs_BR: Tensor
    values_BR: Tensor | None


@dataclass
class Policy:
    """A language model: an adapter (None: the raw base) and, for an actor, the critic's head on the same hidden states.

    temperature: log-probabilities are of logits / temperature.
    detach_values: the value loss trains the head alone.
    """

    backbone: Backbone
    adapter: str | None
    temperature: float
    logprob_chunk: int
    value_head: ScalarHead | None = None
    detach_values: bool = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.backbone.device

    def __call__(self, batch: Sequences) -> PolicyOutput:
        """One forward for log-probabilities and values."""
        batch = batch.to(self.backbone.device)
        hidden_BRH = self._response_states(batch)
        logprobs_N = token_logprobs(*self._head_arguments(batch, hidden_BRH))
        return self._output(batch, hidden_BRH, logprobs_N)

    def observe(self, batch: Sequences) -> tuple[PolicyOutput, Tensor]:
        """The same numbers without gradient, and the entropy of each response token's distribution in nats; [B, R]."""
        batch = batch.to(self.backbone.device)
        hidden_BRH = self._response_states(batch)
        logprobs_N, entropies_N = token_logprobs_and_entropies(*self._head_arguments(batch, hidden_BRH))
        return self._output(batch, hidden_BRH, logprobs_N), _scattered(entropies_N, batch.response_mask_BR)

    def logprobs_all(self, batch: Sequences, microbatch_tokens: int) -> Tensor:
        """Log-probabilities of any number of rows, in eval mode and without gradient; on the CPU, [B, R]."""
        with self.backbone.inference():
            return map_rows(lambda rows: (self(rows).logprobs_BR,), batch, microbatch_tokens)[0]

    def _head_arguments(self, batch: Sequences, hidden_BRH: Tensor) -> tuple[Tensor, Tensor, Tensor, float, int]:
        mask_BR = batch.response_mask_BR
        ids_N = batch.response_ids_BR[mask_BR]
        return hidden_BRH[mask_BR], self.backbone.head_VH, ids_N, self.temperature, self.logprob_chunk

    def _output(self, batch: Sequences, hidden_BRH: Tensor, logprobs_N: Tensor) -> PolicyOutput:
        mask_BR = batch.response_mask_BR
        return PolicyOutput(_scattered(logprobs_N, mask_BR), self._values(hidden_BRH, mask_BR))

    def _values(self, hidden_BRH: Tensor, mask_BR: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        states_BRH = hidden_BRH.detach() if self.detach_values else hidden_BRH
        return torch.where(mask_BR, self.value_head(states_BRH), 0)

    def _response_states(self, batch: Sequences) -> Tensor:
        """Hidden states BEFORE each response token; [B, R, H]."""
        self.backbone.activate(self.adapter)
        hidden_BTH = self.backbone.hidden(batch.tokens_BT, batch.attention_mask_BT)
        columns_BR = (
            batch.prompt_lengths_B[:, None] - 1 + torch.arange(batch.response_width, device=self.backbone.device)
        )
        columns_BR = columns_BR.clamp(max=batch.tokens_BT.shape[1] - 1)
        return hidden_BTH.gather(1, columns_BR[..., None].expand(-1, -1, hidden_BTH.shape[-1]))


@dataclass
class RewardModel:
    """An adapter and a scalar head that reads the state at the last real token."""

    backbone: Backbone
    adapter: str
    head: ScalarHead

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.backbone.device

    def __call__(self, batch: Pairs) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected answers; float32, [B] each."""
        return self.score(batch.chosen), self.score(batch.rejected)

    def score(self, batch: Sequences) -> Tensor:
        """Scores of whole answers; float32, [B]."""
        batch = batch.to(self.backbone.device)
        self.backbone.activate(self.adapter)
        hidden_BTH = self.backbone.hidden(batch.tokens_BT, batch.attention_mask_BT)
        rows_B = torch.arange(len(batch), device=self.backbone.device)
        return self.head(hidden_BTH[rows_B, batch.lengths_B - 1])

    @torch.no_grad()
    def move(self, by: Tensor) -> None:
        """Adds a number to every score from now on."""
        self.head.linear.bias += by

    def score_all(self, batch: Sequences, microbatch_tokens: int) -> Tensor:
        """`score` over any number of rows, in eval mode and without gradient; on the CPU, [B]."""
        with self.backbone.inference():
            return map_rows(lambda rows: (self.score(rows),), batch, microbatch_tokens)[0]

    def score_minibatches(self, rollout: Rollout, end_id: int, microbatch_tokens: int, minibatch_size: int) -> Tensor:
        """The same for answers with an end token put after cut ones, in the micro-batches that PPO's update sees."""
        with self.backbone.inference():
            return map_rows(lambda rows: (self.score(rows.ended(end_id)),), rollout, microbatch_tokens, minibatch_size)[
                0
            ]


def _scattered(values_N: Tensor, mask_BR: Tensor) -> Tensor:
    return torch.zeros(mask_BR.shape, device=mask_BR.device).masked_scatter(mask_BR, values_N)
