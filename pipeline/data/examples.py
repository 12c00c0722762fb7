"""Pairs -> batches of token ids, with a count of everything that was cut or left out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pipeline.batch import Batch, Pairs, Sequences, pad_rows
from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, as_demonstration, prompt_key
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import TrainingError
from pipeline.randomness import permutation

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer. `key` names it in the sampling noise, whatever else is in the data."""

    key: int
    messages: tuple[Message, ...]
    ids: list[int]


def prompts(rows: Sequence[Pair | PromptOnly], tokenizer: ChatTokenizer) -> list[Prompt]:
    """The different prompts of the rows, in order."""
    found: dict[int, Prompt] = {}
    for row in rows:
        key = int(prompt_key(row.prompt)[:15], 16)
        if key not in found:
            found[key] = Prompt(key, row.prompt, tokenizer.prompt_ids(row.prompt))
    return list(found.values())


def sequences(rows: list[tuple[list[int], list[int]]]) -> Sequences:
    """(prompt ids, response ids) rows as one batch."""
    return Sequences(
        tokens_BT=pad_rows([[*prompt, *response] for prompt, response in rows], torch.long),
        prompt_lengths_B=torch.tensor([len(prompt) for prompt, _ in rows]),
        response_lengths_B=torch.tensor([len(response) for _, response in rows]),
    )


def demonstrations(shown: Sequence[Pair | Demonstration], tokenizer: ChatTokenizer) -> tuple[Sequences, dict[str, int]]:
    """The different answers, of pairs the chosen ones, with their prompts, for supervised fine-tuning; and counts.

    A cut answer is trained on as far as it goes: it then has no end token.

    Raises:
        TrainingError: no row has a token to train on.
    """
    rows, cut = [], 0
    for demonstration in dict.fromkeys(map(as_demonstration, shown)):
        response, was_cut = tokenizer.response_ids(demonstration.answer)
        cut += was_cut
        rows.append((tokenizer.prompt_ids(demonstration.prompt), response))
    if not sum(len(response) for _, response in rows):
        raise TrainingError(
            f"There are no tokens to train on in {len(rows)} rows; check the data and tokens.max_response."
        )
    return sequences(rows), {
        "rows": len(rows),
        "answers_cut": cut,
        "trained_tokens": sum(len(response) for _, response in rows),
    }


def comparisons(
    pairs: list[Pair], tokenizer: ChatTokenizer, cut_pairs: str
) -> tuple[Pairs, list[Pair], dict[str, int]]:
    """The pairs that a reward model can learn from, as ids and as they were; and counts by reason of those left out.

    Raises:
        TrainingError: no pair is left.
    """
    counts = Counter({"rows": len(pairs), "pairs_cut": 0, "pairs_equal_after_cut": 0})
    kept, chosen_rows, rejected_rows = [], [], []
    for pair in pairs:
        chosen, chosen_cut = tokenizer.response_ids(pair.chosen)
        rejected, rejected_cut = tokenizer.response_ids(pair.rejected)
        if chosen == rejected:
            counts["pairs_equal_after_cut"] += 1
            continue
        if chosen_cut or rejected_cut:
            counts["pairs_cut"] += 1
            if cut_pairs == "drop":
                continue
        prompt = tokenizer.prompt_ids(pair.prompt)
        kept.append(pair)
        chosen_rows.append((prompt, chosen))
        rejected_rows.append((prompt, rejected))
    counts["pairs"] = len(kept)
    if not kept:
        raise TrainingError(
            f"Of {len(pairs)} pairs none is left: {counts['pairs_cut']} have an answer longer than tokens.max_response "
            f"{tokenizer.max_response}; raise it, or set cut_pairs: keep."
        )
    return Pairs(sequences(chosen_rows), sequences(rejected_rows)), kept, dict(counts)


def epochs_of(data: B, batch_size: int, epochs: int, seed: int) -> Iterator[B]:
    """Batches of shuffled rows, `epochs` times over; the last batch of an epoch may be smaller."""
    for epoch in range(epochs):
        for rows in permutation(len(data), seed, epoch).split(batch_size):
            yield data.select(rows)


def steps_in(data: Batch, batch_size: int, epochs: int) -> int:
    """How many batches `epochs_of` gives."""
    return epochs * -(-len(data) // batch_size)


def prompt_batches(questions: list[Prompt], size: int, count: int, seed: int) -> Iterator[list[Prompt]]:
    """`count` batches of `size` different prompts; each pass over the prompts in a new order, its incomplete last batch left out.

    Batch number n is a function of seed and n.
    """
    per_pass = len(questions) // size
    for number in range(count):
        order = permutation(len(questions), seed, number // per_pass).tolist()
        start = number % per_pass * size
        yield [questions[index] for index in order[start : start + size]]
