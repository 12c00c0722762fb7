"""The shapes of rows that people have: how each is told, and which function of parsing.py reads it.

A shape is told by the fields that are there; a field that is null is not there. Which of several shapes a file has, and
which are refused, is in recognition.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.data.parsing import (
    INSTRUCTION,
    OPENAI_SIDES,
    RANKED,
    SIDES,
    SYSTEM_FIELDS,
    Parsed,
    answered,
    conversation,
    openai_pair,
    pair,
    pair_of_conversations,
    plain_field,
    prompt_alone,
    ranked,
    seed_task,
)

PAIRS, DEMONSTRATIONS, PROMPTS = KINDS = ("pairs", "demonstrations", "prompts")
EXTRAS = ("input", "context", "history")  # what may stand beside an instruction
MESSAGE_SIDES = ("chosen_messages", "rejected_messages")


@dataclass(frozen=True)
class Shape:
    """One shape.

    title: its name for people.
    kind: what its rows are: pairs, demonstrations or prompts.
    parse: a row of this shape as records; raises BadRow.
    fields: all of these are there, and of `either`, where it names any, at least one.
    optional: fields that are read where they are there.
    when: what else holds of its rows.
    """

    title: str
    kind: str
    parse: Callable[[dict[str, Any]], Parsed]
    fields: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    when: Callable[[dict[str, Any]], bool] | None = None

    def fits(self, row: dict[str, Any]) -> bool:
        """Whether the row has this shape's fields."""
        return (
            all(row.get(field) is not None for field in self.fields)
            and (not self.either or any(row.get(field) is not None for field in self.either))
            and (self.when is None or self.when(row))
        )

    def used(self, row: dict[str, Any]) -> set[str]:
        """The fields of the row that it reads."""
        known = (*self.fields, *self.either, *self.optional, *SYSTEM_FIELDS)
        return {field for field in known if row.get(field) is not None}


def has_list(names: tuple[str, ...], row: dict[str, Any]) -> bool:
    """Whether one of the fields is a list."""
    return any(isinstance(row.get(name), list) for name in names)


def _question(field: str, answer: str) -> Shape:
    return Shape(
        f"{field} with {answer}", DEMONSTRATIONS, partial(answered, plain_field(field), answer), (field, answer)
    )


def _instruction(title: str, answer: str) -> Shape:
    return Shape(
        title,
        DEMONSTRATIONS,
        partial(answered, INSTRUCTION, answer),
        ("instruction", answer),
        optional=EXTRAS,
        when=lambda row: not isinstance(row[answer], list),
    )


def _pairs(title: str, field: str) -> Shape:
    return Shape(title, PAIRS, partial(pair, plain_field(field)), (field,), SIDES)


def _ranked(field: str) -> Shape:
    prompt = INSTRUCTION if field == "instruction" else plain_field(field)
    optional = EXTRAS if field == "instruction" else ()
    return Shape(
        "ranked answers", PAIRS, partial(ranked, prompt), (field,), RANKED, optional, partial(has_list, RANKED)
    )


# The names are those that data.shape takes.
SHAPES: dict[str, Shape] = {
    "prompt-pairs": _pairs("prompt with chosen and rejected", "prompt"),
    "question-pairs": _pairs("question with chosen and rejected", "question"),
    "instruction-pairs": Shape(
        "instruction with chosen and rejected", PAIRS, partial(pair, INSTRUCTION), ("instruction",), SIDES, EXTRAS
    ),
    "input-pairs": _pairs("input with chosen and rejected", "input"),
    "sharegpt-pairs": _pairs("ShareGPT pairs", "conversations"),
    "hh-transcripts": Shape(
        "HH transcripts",
        PAIRS,
        partial(pair_of_conversations, SIDES),
        either=SIDES,
        when=lambda row: not has_list(SIDES, row),
    ),
    "conversation-pairs": Shape(
        "pairs of conversations",
        PAIRS,
        partial(pair_of_conversations, SIDES),
        either=SIDES,
        when=partial(has_list, SIDES),
    ),
    "chosen-messages": Shape(
        "chosen_messages and rejected_messages",
        PAIRS,
        partial(pair_of_conversations, MESSAGE_SIDES),
        either=MESSAGE_SIDES,
    ),
    "openai-pairs": Shape("OpenAI preference pairs", PAIRS, openai_pair, ("input",), OPENAI_SIDES),
    "prompt-ranked": _ranked("prompt"),
    "question-ranked": _ranked("question"),
    "instruction-ranked": _ranked("instruction"),
    "messages": Shape("chat messages", DEMONSTRATIONS, partial(conversation, "messages"), ("messages",)),
    "sharegpt": Shape(
        "ShareGPT conversations", DEMONSTRATIONS, partial(conversation, "conversations"), ("conversations",)
    ),
    "conversation": Shape("conversations", DEMONSTRATIONS, partial(conversation, "conversation"), ("conversation",)),
    "alpaca": _instruction("Alpaca instructions", "output"),
    "dolly": _instruction("Dolly instructions", "response"),
    "seed-tasks": Shape("self-instruct seed tasks", DEMONSTRATIONS, seed_task, ("instruction", "instances")),
    "prompt-completion": _question("prompt", "completion"),
    "prompt-response": _question("prompt", "response"),
    "question-answer": _question("question", "answer"),
    "question-response": _question("question", "response"),
    "query-response": _question("query", "response"),
    "input-output": _question("input", "output"),
    "problem-solution": _question("problem", "solution"),
    "prompt-alone": Shape(
        "prompts without answers", PROMPTS, partial(prompt_alone, plain_field("prompt")), ("prompt",)
    ),
    "question-alone": Shape(
        "questions without answers", PROMPTS, partial(prompt_alone, plain_field("question")), ("question",)
    ),
    "instruction-alone": Shape(
        "instructions without answers", PROMPTS, partial(prompt_alone, INSTRUCTION), ("instruction",), optional=EXTRAS
    ),
}
