"""Figures of the prepared rows, for metrics and report: token lengths, truncation, labels, samples.

Rows are iterated over once and none is kept: memory grows with the number of different lengths, not of rows.
"""

import hashlib
import json
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from pipeline.data.conversations import Conversation
from pipeline.data.labels import longer
from pipeline.data.records import Demonstration, Pair, Record, prompt_key
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import DataError

PERCENTILES = (5, 50, 90, 99)


@dataclass(frozen=True)
class Sample:
    """A prepared row as figures and report see it: its part, its prompt, and its answers by name (of a prompt alone, none)."""

    part: str
    prompt: Conversation
    answers: dict[str, str]


@dataclass(frozen=True)
class RowTokens:
    """Token counts of one row.

    lengths: of the prompt and of each answer before anything is cut, end tokens included.
    cut: which of them are longer than their limit.
    spelled: which of them hold the text of a special token.
    equal_after_cut: two answers that differ only in what is cut.
    """

    lengths: dict[str, int]
    cut: frozenset[str]
    spelled: frozenset[str]
    equal_after_cut: bool


def sample_of(part: str, record: Record) -> Sample:
    """A prepared record as a sample."""
    if isinstance(record, Pair):
        return Sample(part, record.prompt, {"chosen": record.chosen, "rejected": record.rejected})
    if isinstance(record, Demonstration):
        return Sample(part, record.prompt, {"answer": record.answer})
    return Sample(part, record.prompt, {})


def row_tokens(row: Sample, tokenizer: ChatTokenizer) -> RowTokens:
    """Tokenises one row.

    Raises:
        DataError: the template refuses the conversation.
    """
    answers = {name: tokenizer.whole_response_ids(text) for name, text in row.answers.items()}
    lengths = {
        "prompt": len(tokenizer.whole_prompt_ids(row.prompt)),
        **{name: len(ids) for name, ids in answers.items()},
    }
    limits = {"prompt": tokenizer.max_prompt} | dict.fromkeys(answers, tokenizer.max_response)
    texts = {"prompt": "\n".join(message.content for message in row.prompt), **row.answers}
    after_cut = {tuple(ids[: tokenizer.max_response]) for ids in answers.values()}
    return RowTokens(
        lengths=lengths,
        cut=frozenset(name for name, length in lengths.items() if length > limits[name]),
        spelled=frozenset(name for name, text in texts.items() if tokenizer.holds_special(text)),
        equal_after_cut=len(after_cut) < len(answers),
    )


@dataclass
class TokenCounts:
    """Token counts of all rows so far, of the prompts and of each kind of answer."""

    lengths: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    cut: Counter[str] = field(default_factory=Counter)
    spelled: Counter[str] = field(default_factory=Counter)
    equal_after_cut: int = 0

    def add(self, row: RowTokens) -> None:
        """Counts one more row."""
        for name, length in row.lengths.items():
            self.lengths[name][length] += 1
        self.cut.update(row.cut)
        self.spelled.update(row.spelled)
        self.equal_after_cut += row.equal_after_cut

    def figures(self) -> dict[str, Any]:
        """Count, percentiles of length, how many are cut; and pairs equal after the cut.

        A percentile is the smallest length that so many percent of the rows do not exceed.
        """
        kinds = {
            name: {
                "count": counts.total(),
                "cut": self.cut[name],
                "spell_special_tokens": self.spelled[name],
                **{f"p{percent}": _percentile(counts, percent) for percent in PERCENTILES},
                "max": max(counts),
            }
            for name, counts in self.lengths.items()
        }
        return {"lengths": kinds, "pairs_equal_after_cut": self.equal_after_cut}


@dataclass
class Picked:
    """The `count` rows with the smallest hashes: as good as drawn by lot, and the same whatever the rows' order."""

    count: int = 5
    hashed: list[tuple[str, Sample]] = field(default_factory=list)

    def add(self, row: Sample) -> None:
        """Offers one more row."""
        entry = (_hash(row), row)
        if len(self.hashed) < self.count or entry[0] < self.hashed[-1][0]:
            insort(self.hashed, entry, key=itemgetter(0))
            del self.hashed[self.count :]

    def samples(self) -> list[Sample]:
        """The rows, in the order of their hashes."""
        return [row for _, row in self.hashed]


@dataclass
class PairCounts:
    """Pairs of a part.

    cut: with an answer that is longer than tokens.max_response.
    equal: whose answers are equal after the cut.
    """

    pairs: int = 0
    cut: int = 0
    equal: int = 0

    def add(self, row: RowTokens) -> None:
        """Counts one more pair; under one reason, as `comparisons` does."""
        self.pairs += 1
        self.equal += row.equal_after_cut
        self.cut += not row.equal_after_cut and bool(row.cut - {"prompt"})

    def left(self, cut_pairs: str) -> int:
        """How many a reward model can learn from, with `cut_pairs` drop or keep."""
        return self.pairs - self.equal - (self.cut if cut_pairs == "drop" else 0)


@dataclass
class Survey:
    """Everything that metrics and report say of the rows, gathered while they are written: a million rows are not read twice."""

    tokenizer: ChatTokenizer
    tokens: TokenCounts = field(default_factory=TokenCounts)
    picked: Picked = field(default_factory=Picked)
    signs: Counter[int] = field(default_factory=Counter)  # of labels.longer
    pairs: dict[str, PairCounts] = field(default_factory=lambda: defaultdict(PairCounts))  # by part

    def of_raw(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, looked at in passing, as they came."""
        for record in records:
            if isinstance(record, Pair):
                self.signs[longer(record)] += 1
            yield record

    def of_part(self, part: str, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, looked at in passing, as the part's stage will read them."""
        for record in records:
            row = sample_of(part, record)
            tokens = row_tokens(row, self.tokenizer)
            self.tokens.add(tokens)
            self.picked.add(row)
            if isinstance(record, Pair):
                self.pairs[part].add(tokens)
            yield record


def check_equal_after_cut(tokens: TokenCounts, max_response: int, max_bad_share: float) -> None:
    """Pairs that the cut makes equal are bad rows, though no line of the data is at fault.

    Raises:
        DataError: they are more than `max_bad_share` of the pairs.
    """
    equal, pairs = tokens.equal_after_cut, tokens.lengths.get("chosen", Counter()).total()
    if equal > max_bad_share * pairs:
        raise DataError(
            f"{equal:,} of {pairs:,} pairs ({equal / pairs:.2%}) have answers that are equal after the cut at tokens.max_response "
            f"{max_response}, more than data.max_bad_share {max_bad_share:g}; raise tokens.max_response, or data.max_bad_share "
            "to go on without them."
        )


def _percentile(counts: Counter[int], percent: int) -> int:
    reached = 0
    for length in sorted(counts):
        reached += counts[length]
        if 100 * reached >= percent * counts.total():
            return length
    raise AssertionError("no percentile of nothing")


def _hash(row: Sample) -> str:
    return hashlib.sha256((prompt_key(row.prompt) + json.dumps(row.answers, sort_keys=True)).encode()).hexdigest()
