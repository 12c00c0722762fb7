"""Figures of the prepared rows, for metrics and report: token lengths and truncation.

Rows are iterated over once and none is kept: memory grows with the number of different lengths, not of rows.
"""

import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.data.conversations import Conversation
from pipeline.data.records import Demonstration, Pair, Record, prompt_key
from pipeline.data.tokenization import ChatTokenizer

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


def pick_samples(rows: Iterable[Sample], count: int = 5) -> list[Sample]:
    """The `count` rows with the smallest hashes: as good as drawn by lot, and the same whatever the rows' order."""
    return heapq.nsmallest(count, rows, key=_hash)


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


def token_figures(rows: Iterable[RowTokens]) -> dict[str, Any]:
    """Of the prompts and of each kind of answer: count, percentiles of length, how many are cut; and pairs equal after the cut.

    A percentile is the smallest length that so many percent of the rows do not exceed.
    """
    lengths: dict[str, Counter[int]] = defaultdict(Counter)
    cut: Counter[str] = Counter()
    spelled: Counter[str] = Counter()
    equal_after_cut = 0
    for row in rows:
        for name, length in row.lengths.items():
            lengths[name][length] += 1
        cut.update(row.cut)
        spelled.update(row.spelled)
        equal_after_cut += row.equal_after_cut
    kinds = {
        name: {
            "count": counts.total(),
            "cut": cut[name],
            "spell_special_tokens": spelled[name],
            **{f"p{percent}": _percentile(counts, percent) for percent in PERCENTILES},
            "max": max(counts),
        }
        for name, counts in lengths.items()
    }
    return {"lengths": kinds, "pairs_equal_after_cut": equal_after_cut}


def _percentile(counts: Counter[int], percent: int) -> int:
    reached = 0
    for length in sorted(counts):
        reached += counts[length]
        if 100 * reached >= percent * counts.total():
            return length
    raise AssertionError("no percentile of nothing")


def _hash(row: Sample) -> str:
    return hashlib.sha256((prompt_key(row.prompt) + json.dumps(row.answers, sort_keys=True)).encode()).hexdigest()
