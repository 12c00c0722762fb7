"""Frozen batches of token rows: select, split, order by length, trim padding.

A field's suffix names its axes, and that is what selecting and trimming go by:
B rows; T all tokens of a row (prompt, then response, padded on the right); R response tokens, from column 0 on.
Response token t of row b stands at column prompt_lengths_B[b] + t of T; index t of an R field always means that token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline import processes, ranks
from pipeline.out_of_memory import MICROBATCH
from pipeline.tensors import length_mask


@dataclass(frozen=True)
class Batch(ABC):
    """Anything with rows.

    sequences_per_row: how many sequences one row puts into a forward pass.
    """

    sequences_per_row: ClassVar[int] = 1

    def __len__(self) -> int:
        first = getattr(self, fields(self)[0].name)
        return len(first)

    @property
    @abstractmethod
    def num_terms(self) -> int:
        """How many terms an objective over this batch sums up; the one divisor of its loss."""

    @property
    @abstractmethod
    def lengths_B(self) -> Tensor:
        """Length of each row, for ordering rows of like length together."""

    def select(self, rows_N: Tensor) -> Self:
        """The given rows, in the given order, padding trimmed to the longest of them."""
        chosen = {}
        for field in fields(self):
            value = getattr(self, field.name)
            chosen[field.name] = value.select(rows_N) if isinstance(value, Batch) else value[rows_N]
        return replace(self, **chosen)._trimmed()

    def split(self, size: int) -> list[Self]:
        """Consecutive batches of `size` rows; the last may be smaller."""
        return [self.select(rows) for rows in torch.arange(len(self)).split(size)]

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def _trimmed(self) -> Self:
        return self


@dataclass(frozen=True)
class Sequences(Batch):
    """Prompts with responses."""

    tokens_BT: Tensor
    prompt_lengths_B: Tensor
    response_lengths_B: Tensor

    @property
    def lengths_B(self) -> Tensor:
        """Prompt and response together."""
        return self.prompt_lengths_B + self.response_lengths_B

    @property
    def attention_mask_BT(self) -> Tensor:
        """True at real tokens; made from lengths, never from ids."""
        return length_mask(self.lengths_B, self.tokens_BT.shape[1])

    @property
    def response_mask_BR(self) -> Tensor:
        """True at response tokens, the end token included."""
        return length_mask(self.response_lengths_B, self.response_width)

    @property
    def response_width(self) -> int:
        """Length of the longest response."""
        return int(self.response_lengths_B.max())

    @property
    def response_ids_BR(self) -> Tensor:
        """Response tokens moved to column 0; what stands outside the mask has no meaning."""
        columns_BR = self.prompt_lengths_B[:, None] + torch.arange(self.response_width, device=self.tokens_BT.device)
        return self.tokens_BT.gather(1, columns_BR.clamp(max=self.tokens_BT.shape[1] - 1))

    @property
    def num_terms(self) -> int:
        """Response tokens."""
        return int(self.response_lengths_B.sum())

    def _trimmed(self) -> Self:
        if len(self) == 0:
            return self
        widths = {"BT": int(self.lengths_B.max()), "BR": self.response_width}
        trimmed = {}
        for field in fields(self):
            axes = field.name.rpartition("_")[2]
            if axes in widths:
                trimmed[field.name] = getattr(self, field.name)[:, : widths[axes]]
        return replace(self, **trimmed)


@dataclass(frozen=True)
class Pairs(Batch):
    """A chosen and a rejected answer to each prompt."""

    chosen: Sequences
    rejected: Sequences
    sequences_per_row: ClassVar[int] = 2

    @property
    def lengths_B(self) -> Tensor:
        """The longer of the two answers, with its prompt."""
        return torch.maximum(self.chosen.lengths_B, self.rejected.lengths_B)

    @property
    def num_terms(self) -> int:
        """Pairs."""
        return len(self)


@dataclass(frozen=True)
class Rollout(Sequences):
    """Sampled responses.

    behaviour_logprobs_BR: log-probabilities as the sampler saw them, at the sampling temperature, float32.
    truncated_B: the response hit the length limit and its last token is no stop token.
    prompt_ids_B: which prompt of the data set a row answers.
    """

    behaviour_logprobs_BR: Tensor
    truncated_B: Tensor
    prompt_ids_B: Tensor

    def answered(self) -> Self:
        """Without the prompts of rows that have no response: they teach nothing, and would change the shapes of other rows' passes.

        All answers to such a prompt go, so that groups stay whole. `generate` makes no such row; another sampler may.
        """
        unanswered = self.prompt_ids_B[self.response_lengths_B == 0]
        kept_B = ~torch.isin(self.prompt_ids_B, unanswered)
        return self if kept_B.all() else self.select(kept_B.nonzero().squeeze(1))

    def ended(self, end_id: int) -> Sequences:
        """The answers with an end token put after those that were cut, for reward models.

        A reward model has only seen answers that end, and reads its score there: at any other token its score means
        nothing (measured on the demo: 4.7 points more for being cut). That an answer was cut is paid for apart.
        """
        tokens_BT = F.pad(self.tokens_BT, (0, 1))
        at_end_B1 = self.lengths_B[:, None]
        last_B1 = torch.where(self.truncated_B[:, None], end_id, tokens_BT.gather(1, at_end_B1))
        return Sequences(
            tokens_BT.scatter(1, at_end_B1, last_B1),
            self.prompt_lengths_B,
            self.response_lengths_B + self.truncated_B.long(),
        )._trimmed()


@dataclass(frozen=True)
class Experience(Rollout):
    """A rollout with everything that the update needs; all float32, without gradient.

    values_BR[:, t] is the value of the state BEFORE token t is chosen. raw_advantages_BR are from before whitening, returns_BR
    what the critic learns. weights_BR corrects each token's policy term for
    the gap between the sampler and the policy (ones where there is none).
    """

    old_logprobs_BR: Tensor
    ref_logprobs_BR: Tensor
    entropies_BR: Tensor
    values_BR: Tensor
    scores_B: Tensor
    rewards_BR: Tensor
    advantages_BR: Tensor
    raw_advantages_BR: Tensor
    returns_BR: Tensor
    weights_BR: Tensor


def pad_rows(rows: list[list[int]] | list[Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of unequal length as one tensor, zeros on the right; [len(rows), longest]."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = torch.as_tensor(row, dtype=dtype)
    return padded


def microbatches(batch: Batch, tokens: int) -> Iterator[tuple[Tensor, Batch]]:
    """(rows, batch of these rows) of at most `tokens` tokens, padding and both answers of a pair included.

    Rows of like length are together, so that little is padded; a row that is longer than that is alone. The order is a
    function of the batch alone: two passes over one batch see the same shapes. Before each a stage may be stopped.

    Of several processes each gets its own rows, of like length to those of the others, and all get the same number of
    micro-batches. Where rows have run out for a process, `rows` is empty and the batch is somebody else's row: nothing of it counts.
    """
    lengths_B, order_B = batch.lengths_B.cpu().sort(stable=True)
    # in a round each process gets one row; the last is the widest
    widths = [int(widths_b[-1]) for widths_b in (lengths_B * batch.sequences_per_row).split(processes.count())]
    start = 0
    for rounds in _sizes(widths, tokens):
        of_all = order_B[start : start + rounds * processes.count()]
        start += len(of_all)
        rows = ranks.dealt(of_all)
        ranks.poll()
        yield rows, batch.select(rows if len(rows) else of_all[:1])


def _sizes(widths: list[int], tokens: int) -> list[int]:
    """How many neighbours go together: as many as rows times the widest allows; widths rise."""
    sizes: list[int] = []
    for width in widths:
        if sizes and (sizes[-1] + 1) * width <= tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


@torch.no_grad()
def map_rows(
    function: Callable[[Batch], tuple[Tensor, ...]],
    batch: Batch,
    microbatch_tokens: int,
    minibatch_size: int | None = None,
) -> tuple[Tensor, ...]:
    """`function` over micro-batches, without gradient; its results in the batch's own order, padded with zeros to one width.

    `function` gives tensors [b] or [b, r]. With `minibatch_size` the micro-batches are those of consecutive minibatches:
    the shapes that the update's first epoch has. Where memory runs out, micro-batches are halved.
    """
    return MICROBATCH.fit(microbatch_tokens, lambda size: _map_rows(function, batch, size, minibatch_size))


def _map_rows(
    function: Callable[[Batch], tuple[Tensor, ...]], batch: Batch, microbatch_tokens: int, minibatch_size: int | None
) -> tuple[Tensor, ...]:
    passes: list[tuple[Tensor, list[Tensor]]] = []
    start = 0
    for part in batch.split(minibatch_size or len(batch)):
        for rows, micro in microbatches(part, microbatch_tokens):
            passes.append((start + rows, [output.cpu() for output in function(micro)]))
        start += len(part)
    results: list[list[Tensor]] = [[] for _ in range(len(batch))]
    for rows, outputs in chain.from_iterable(ranks.gather(passes)):
        for place, row in enumerate(rows.tolist()):
            results[row] = [output[place] for output in outputs]
    columns = zip(*results, strict=True)
    return tuple(
        torch.stack(column) if column[0].ndim == 0 else pad_rows(list(column), column[0].dtype) for column in columns
    )
