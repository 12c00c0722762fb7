"""Rows of each shape -> records, or the reason why not. shapes.py says which row goes to which function."""

from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from pipeline.data.prompts import INSTRUCTION, SYSTEM_FIELDS, PromptField, checked, with_system
from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record
from pipeline.data.turns import (
    BadRow,
    Turn,
    answer_of,
    check_prompt,
    first_there,
    is_transcript,
    prompt_of,
    required,
    text_of,
    transcript_turns,
    turns_of,
    type_of,
    whole_text,
    wrong_type,
)

SIDES = ("chosen", "rejected")
OPENAI_SIDES = ("preferred_output", "non_preferred_output")
REJECTED_FIELDS = ("rejected_response", "rejected_messages")  # beside messages, as ms-swift has them
SCORES = ("scores", "ratings", "rewards")  # of ranked answers
MOST_RANKED = 100
RANKED = ("outputs", "responses", "output")


@dataclass(frozen=True)
class Parsed:
    """The records of a row, and how many of its answers are left out because their loss weight is 0."""

    records: tuple[Record, ...]
    left_out: int = 0


def prompt_alone(prompt: PromptField, row: dict[str, Any]) -> Parsed:
    """A prompt that waits for an answer."""
    return Parsed((PromptOnly(checked(prompt, row)),))


# --- demonstrations ---


def answered(prompt: PromptField, answer: str, row: dict[str, Any]) -> Parsed:
    """A prompt, and in the field `answer` its answer as text, or turns that go on from the prompt and may repeat it."""
    turns, start = _continued(answer, required(row, answer), checked(prompt, row))
    return _demonstrations(answer, turns, start)


def seed_task(row: dict[str, Any]) -> Parsed:
    """An instruction with a list of `instances`, each an input and an output: one demonstration for each."""
    instances = required(row, "instances")
    if not isinstance(instances, list) or not instances:
        raise wrong_type("instances", instances, "a list with at least one entry")
    records: list[Record] = []
    for instance in instances:
        if not isinstance(instance, dict):
            raise wrong_type("instances: an entry", instance, "an object")
        shared = {field: row[field] for field in ("instruction", *SYSTEM_FIELDS) if field in row}
        one = shared | instance
        records += answered(INSTRUCTION, "output", one).records
    return Parsed(tuple(records))


def conversation(field: str, row: dict[str, Any]) -> Parsed:
    """One demonstration per answer, with all turns before it as its prompt. A last turn of the user's is a prompt."""
    turns = turns_of(field, required(row, field))
    messages = with_system(row, tuple(turn.message for turn in turns))
    before = [Turn(message) for message in messages[: len(messages) - len(turns)]]
    answers = _demonstrations(field, [*before, *turns])
    if messages[-1].role == "user":
        check_prompt(field, messages)
        return replace(answers, records=(*answers.records, PromptOnly(messages)))
    if messages[-1].role == "system":
        raise BadRow(field, "a list", "ends with a system turn")
    return answers


def _demonstrations(field: str, turns: list[Turn], start: int = 0) -> Parsed:
    """One demonstration for each answer from turn `start` on."""
    messages = tuple(turn.message for turn in turns)
    records: list[Record] = []
    left_out = known = 0
    for number in range(start, len(turns)):
        if messages[number].role != "assistant":
            continue
        if number == 0 or messages[number - 1].role != "user":
            raise BadRow(field, "a list", "has an assistant's turn that does not follow a user's")
        check_prompt(field, messages[:number], known)
        answer_of(field if start == len(turns) - 1 else f"{field}: an assistant's turn", messages[number].content)
        known = number + 1
        if turns[number].trained:
            records.append(Demonstration(messages[:number], messages[number].content))
        else:
            left_out += 1
    return Parsed(tuple(records), left_out)


# --- pairs ---


def pair(prompt: PromptField, row: dict[str, Any]) -> Parsed:
    """A prompt, and `chosen` and `rejected` as text, as turns, or as conversations that repeat the prompt."""
    _check_sides(row, SIDES)
    return _two_sides(prompt.name, prompt.read(row), row, SIDES)


def pair_of_conversations(sides: tuple[str, str], row: dict[str, Any]) -> Parsed:
    """Two whole conversations, as transcripts or messages, that are the same up to their last answers."""
    _check_sides(row, sides)
    if any(isinstance(row[side], dict) for side in sides):
        raise BadRow("prompt", "missing", "is missing")
    return _two_sides("prompt", None, row, sides)


def messages_rejected(row: dict[str, Any]) -> Parsed:
    """A conversation in `messages`, whose last answer is the chosen one, and beside it the rejected one, as text or messages."""
    sides = ("messages", next((name for name in REJECTED_FIELDS if row.get(name) is not None), REJECTED_FIELDS[0]))
    _check_sides(row, sides)
    *before, last = prompt_of("messages", row["messages"])
    if last.role != "assistant":
        raise BadRow("messages", "a list", "does not end with an assistant's turn")
    return _two_sides("messages", with_system(row, tuple(before)), row, sides)


def openai_pair(row: dict[str, Any]) -> Parsed:
    """OpenAI's preference format: messages in `input`, and two lists of messages that go on from there."""
    given = required(row, "input")
    if not isinstance(given, dict):
        raise wrong_type("input", given, "an object with messages")
    prompt = with_system(row, prompt_of("input.messages", given.get("messages")))
    _check_sides(row, OPENAI_SIDES)
    return _two_sides("input.messages", prompt, row, OPENAI_SIDES)


def ranked(prompt: PromptField, row: dict[str, Any]) -> Parsed:
    """A list of answers, the best first: every answer against every later one, n (n - 1) / 2 pairs."""
    found = checked(prompt, row)
    name, *others = [name for name in RANKED if row.get(name) is not None] or RANKED
    if others and row.get(others[0]) is not None:
        raise BadRow(others[0], type_of(row[others[0]]), f"is there beside {name}; leave one of them out")
    value = required(row, name)
    if not isinstance(value, list) or len(value) < 2:
        raise wrong_type(name, value, "a list of two or more answers, the best first")
    if len(value) > MOST_RANKED:
        raise BadRow(
            name, "a list", f"has more than {MOST_RANKED} answers, each of which would be paired with all others"
        )
    names = [f"{name}[{number}]" for number in range(len(value))]
    answers = [answer_of(place, text_of(place, answer)) for place, answer in zip(names, value, strict=True)]
    scores = first_there(row, *SCORES)
    if isinstance(scores, list) and len(scores) == len(value) and _rises(scores):
        raise BadRow(name, "a list", "is not in the order of its scores; the best answer must come first")
    ranks = combinations(range(len(answers)), 2)
    return Parsed(tuple(_differing(found, answers[i], answers[j], (names[i], names[j])) for i, j in ranks))


def _rises(scores: list[Any]) -> bool:
    known = [score for score in scores if isinstance(score, int | float)]
    return any(later > earlier for earlier, later in pairwise(known))


def _check_sides(row: dict[str, Any], sides: tuple[str, str]) -> None:
    for side in sides:
        if not isinstance(required(row, side), str | list | dict):
            raise wrong_type(side, row[side], "text or messages")


def _two_sides(field: str, prompt: tuple[Message, ...] | None, row: dict[str, Any], sides: tuple[str, str]) -> Parsed:
    """The prompt is all turns before the last on both sides, which must be the same; the last turns are the answers."""
    if prompt is not None:
        check_prompt(field, prompt)
    chosen, rejected = (_judged(side, row[side], prompt) for side in sides)
    if chosen[:-1] != rejected[:-1]:
        raise BadRow(sides[1], "text", f"differs from {sides[0]} before the last answer")
    shared = chosen[:-1] if prompt is not None else with_system(row, chosen[:-1])
    check_prompt(field, shared)
    answers = [answer_of(side, turns[-1].content) for side, turns in zip(sides, (chosen, rejected), strict=True)]
    return Parsed((_differing(shared, *answers, sides),))


def _differing(prompt: tuple[Message, ...], chosen: str, rejected: str, names: tuple[str, str]) -> Pair:
    if chosen == rejected:
        raise BadRow(names[1], "text", f"is the same as {names[0]}")
    return Pair(prompt, chosen, rejected)


def _judged(field: str, value: Any, prompt: tuple[Message, ...] | None) -> tuple[Message, ...]:
    """One side of a pair as a whole conversation, whose last answer is the one that was judged."""
    turns, _ = _continued(field, value, prompt)
    if not turns[-1].trained:
        raise BadRow(field, "a number", "has loss weight 0 on its last answer")
    return tuple(turn.message for turn in turns)


def _continued(field: str, value: Any, prompt: tuple[Message, ...] | None) -> tuple[list[Turn], int]:
    """A whole conversation, the prompt and what `value` adds to it, and the number of the first turn after the prompt.

    A list of messages or a transcript may repeat the prompt. Without a prompt, `value` must be one of these.
    """
    if isinstance(value, str):
        if prompt is None or is_transcript(value):
            turns = [Turn(message) for message in transcript_turns(field, value)]
        else:
            turns = [Turn(Message("assistant", whole_text(field, value)))]
    elif isinstance(value, list | dict):
        turns = turns_of(field, value if isinstance(value, list) else [value])
    else:
        raise wrong_type(field, value, "text or messages")
    turns, start = _after_prompt(field, turns, prompt or ())
    if turns[-1].message.role != "assistant":
        raise BadRow(field, "a list", "does not end with an assistant's turn")
    return turns, start


def _after_prompt(field: str, turns: list[Turn], prompt: tuple[Message, ...]) -> tuple[list[Turn], int]:
    """The prompt and the turns, which may repeat it, with or without its system turn; and where it ends."""
    end = _end_of(prompt, turns)
    if end is not None:
        return turns, end
    known = [Turn(message) for message in prompt]
    if turns[0].message.role == "assistant":
        return [*known, *turns], len(known)
    end = _end_of(prompt[1:], turns) if prompt[0].role == "system" and turns[0].message.role != "system" else None
    if end is None:
        raise BadRow(field, "a list", "is a conversation in which the prompt does not occur")
    return [known[0], *turns], end + 1


def _end_of(prompt: tuple[Message, ...], turns: list[Turn]) -> int | None:
    """Where the prompt's turns end that stand together before the last turn, white space at their ends aside; None: nowhere."""
    bare = [(turn.message.role, turn.message.content.strip()) for turn in turns[:-1]]
    wanted = [(turn.role, turn.content.strip()) for turn in prompt]
    ends = range(len(wanted), len(bare) + 1)
    return next((end for end in ends if bare[end - len(wanted) : end] == wanted), None)
