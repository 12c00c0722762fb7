"""The peak of one pass of each kind, above all that lies in memory before it begins; rows as long as they may be.

Axes: B rows, P prompt columns, R response tokens, T both, H hidden, V vocabulary, N tokens counted one by one.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.heads import ScalarHead
from pipeline.planning.live import LiveBytes, empty
from pipeline.planning.skeleton import PlannedBackbone
from pipeline.rollout import invert_cdf
from pipeline.sampler import Decoder, decoding
from pipeline.tensors import token_logprobs, token_logprobs_and_entropies

Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of one pass, all of full length."""

    count: int
    prompt: int
    response: int

    @property
    def width(self) -> int:
        """Prompt and response."""
        return self.prompt + self.response

    def __str__(self) -> str:
        return f"{self.count} x {self.width} tokens"


def training(backbone: PlannedBackbone, loss: Loss, dropout: bool, passes: int) -> int:
    """Peak of forward and backward. From the second pass of a step on, gradients lie there before it begins."""
    with LiveBytes(_lying(backbone)) as live, backbone.training(dropout=dropout):
        for _ in range(min(passes, 2)):
            loss().backward()
    return live.peak


def scoring(backbone: PlannedBackbone, forward: Callable[[], object]) -> int:
    """Peak of a forward without gradient."""
    with LiveBytes(_lying(backbone)) as live, backbone.inference():
        forward()
    return live.peak


def sampling_first(backbone: PlannedBackbone, rows: Rows, samples: int, merge: bool) -> int:
    """Peak while the first tokens of a chunk of the rollout are sampled: all prompts go through, each once."""
    with _decoding(backbone, rows, merge) as (live, decoder):
        prompts = -(-rows.count // samples)
        _sample(
            decoder.start(empty(prompts, rows.prompt), empty(prompts, rows.prompt, dtype=torch.bool), empty(rows.count))
        )
    return live.peak


def sampling_last(backbone: PlannedBackbone, rows: Rows, merge: bool) -> int:
    """Peak while its last tokens are sampled, no row having ended early: the cache is full.

    How the tokens came there does not count, so they come all at once.
    """
    before = rows.width - 1
    with _decoding(backbone, rows, merge) as (live, decoder):
        decoder.start(empty(rows.count, before), empty(rows.count, before, dtype=torch.bool), empty(rows.count))
        live.restart_peak()
        _sample(decoder.step(empty(rows.count)))
    return live.peak


@contextlib.contextmanager
def _decoding(backbone: PlannedBackbone, rows: Rows, merge: bool) -> Iterator[tuple[LiveBytes, Decoder]]:
    with (
        LiveBytes(_lying(backbone)) as live,
        decoding(backbone, backbone.adapter, merge, "auto", False, rows.width) as open_decoder,
    ):
        yield live, open_decoder(rows.count, rows.width)


def _sample(logits_BV: Tensor) -> Tensor:
    """What `rollout.generate_chunk` does with logits."""
    logprobs_BV = torch.log_softmax(logits_BV / 1.0, dim=-1)
    return invert_cdf(logprobs_BV.exp(), empty(len(logits_BV), dtype=torch.float64))


# --- what is computed in a pass ---


def policy_loss(backbone: PlannedBackbone, rows: Rows, chunk: int, head: ScalarHead | None = None) -> Tensor:
    """What Policy does, on response tokens, and a loss of its log-probabilities and values."""
    states_BRH = _response_states(backbone, rows)
    logprobs_N = token_logprobs(
        states_BRH.flatten(0, 1), backbone.head_VH, empty(rows.count * rows.response), 1.0, chunk
    )
    loss = logprobs_N.sum()
    return loss if head is None else loss + head(states_BRH).sum()


def observation(backbone: PlannedBackbone, rows: Rows, chunk: int) -> tuple[Tensor, Tensor]:
    """The same with entropies, for the experience."""
    states_NH = _response_states(backbone, rows).flatten(0, 1)
    return token_logprobs_and_entropies(states_NH, backbone.head_VH, empty(len(states_NH)), 1.0, chunk)


def score(backbone: PlannedBackbone, rows: Rows, head: ScalarHead) -> Tensor:
    """What RewardModel does; [B]."""
    return head(_hidden(backbone, rows)[empty(rows.count), empty(rows.count)])


def pair_loss(of_one: Callable[[], Tensor]) -> Tensor:
    """A loss of two answers, whose graphs live together."""
    return of_one().sum() - of_one().sum()


def _hidden(backbone: PlannedBackbone, rows: Rows) -> Tensor:
    return backbone.hidden(empty(rows.count, rows.width), empty(rows.count, rows.width, dtype=torch.bool))


def _response_states(backbone: PlannedBackbone, rows: Rows) -> Tensor:
    hidden_BTH = _hidden(backbone, rows)
    columns_BR1 = empty(rows.count, rows.response, 1)
    return hidden_BTH.gather(1, columns_BR1.expand(-1, -1, hidden_BTH.shape[-1]))


def _lying(backbone: PlannedBackbone) -> list[Tensor]:
    """All that is there before a pass."""
    cached = (getattr(module, "cached_weight_OI", None) for module in backbone.causal.modules())
    return [*backbone.causal.parameters(), *backbone.causal.buffers(), *(copy for copy in cached if copy is not None)]
