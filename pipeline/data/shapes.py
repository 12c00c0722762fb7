"""The shapes of rows that people have: how each is told, and which function of parsing.py reads it.

A shape is told by the fields that are there; a field that is null is not there. Which of several shapes a file has, and
which are refused, is in recognition.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.data.parsing import (
    OPENAI_SIDES,
    RANKED,
    REJECTED_FIELDS,
    SCORES,
    SIDES,
    Parsed,
    answered,
    conversation,
    messages_rejected,
    openai_pair,
    pair,
    pair_of_conversations,
    prompt_alone,
    ranked,
    seed_task,
)
from pipeline.data.prompts import INSTRUCTION, QUESTION, SYSTEM_FIELDS, PromptField, plain_field

PAIRS, DEMONSTRATIONS, PROMPTS = KINDS = ("pairs", "demonstrations", "prompts")
EXTRAS = {  # what may stand beside a prompt
    "instruction": ("input", "context", "history"),
    "question": ("context", "history"),
}
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


def _extras(field: str) -> tuple[str, ...]:
    return EXTRAS.get(field, ("history",))


def _prompt(field: str) -> PromptField:
    return {"instruction": INSTRUCTION, "question": QUESTION}.get(field) or plain_field(field)


def _answered(field: str, answer: str) -> Shape:
    title = f"{field} with {answer}"
    return Shape(
        title,
        DEMONSTRATIONS,
        partial(answered, _prompt(field), answer),
        (field, answer),
        optional=_extras(field),
    )


def _instruction(title: str, answer: str) -> Shape:
    return Shape(
        title,
        DEMONSTRATIONS,
        partial(answered, INSTRUCTION, answer),
        ("instruction", answer),
        optional=EXTRAS["instruction"],
        when=lambda row: not isinstance(row[answer], list),
    )


def _pairs(field: str) -> Shape:
    title = f"{field} with chosen and rejected"
    return Shape(title, PAIRS, partial(pair, _prompt(field)), (field,), SIDES, _extras(field))


def _ranked(field: str) -> Shape:
    optional = (*_extras(field), *SCORES)
    return Shape(
        "ranked answers", PAIRS, partial(ranked, _prompt(field)), (field,), RANKED, optional, partial(has_list, RANKED)
    )


def _alone(field: str) -> Shape:
    return Shape(
        f"{field}s without answers",
        PROMPTS,
        partial(prompt_alone, _prompt(field)),
        (field,),
        optional=_extras(field),
    )


# The names are those that data.shape takes.
SHAPES: dict[str, Shape] = {
    "prompt-pairs": _pairs("prompt"),
    "question-pairs": _pairs("question"),
    "instruction-pairs": _pairs("instruction"),
    "input-pairs": _pairs("input"),
    "sharegpt-pairs": replace(_pairs("conversations"), title="ShareGPT pairs"),
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
    "messages-rejected": Shape(
        "messages with a rejected answer", PAIRS, messages_rejected, ("messages",), either=REJECTED_FIELDS
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
    "prompt-completion": _answered("prompt", "completion"),
    "prompt-response": _answered("prompt", "response"),
    "question-answer": _answered("question", "answer"),
    "question-response": _answered("question", "response"),
    "query-response": _answered("query", "response"),
    "input-output": _answered("input", "output"),
    "problem-solution": _answered("problem", "solution"),
    "prompt-alone": _alone("prompt"),
    "question-alone": _alone("question"),
    "instruction-alone": _alone("instruction"),
}
