"""Rows of each shape -> records, or the reason why not. shapes.py says which row goes to which function."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record
from pipeline.data.turns import (
    BadRow,
    answer_of,
    check_prompt,
    prompt_of,
    required,
    text_of,
    transcript_turns,
    turns_of,
    wrong_type,
)

SYSTEM_FIELDS = ("system", "system_prompt")
SIDES = ("chosen", "rejected")
OPENAI_SIDES = ("preferred_output", "non_preferred_output")
RANKED = ("outputs", "responses", "output")


@dataclass(frozen=True)
class Parsed:
    """The records of a row, and how many of its answers are left out because their loss weight is 0."""

    records: tuple[Record, ...]
    left_out: int = 0


@dataclass(frozen=True)
class PromptField:
    """Where a shape has its prompt. `read` raises BadRow."""

    name: str
    read: Callable[[dict[str, Any]], tuple[Message, ...]]


# --- prompts ---


def with_system(row: dict[str, Any], prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt after the system message that some data keep in a field of its own."""
    for field in SYSTEM_FIELDS:
        if row.get(field) is None or not text_of(field, row[field]).strip():
            continue
        if prompt and prompt[0].role == "system":
            if prompt[0].content.strip() == row[field].strip():
                return prompt
            raise BadRow(field, "text", "is there beside another system turn; leave one of them out")
        return (Message("system", row[field]), *prompt)
    return prompt


def plain_field(name: str) -> PromptField:
    """A prompt in one field, as text or messages."""
    return PromptField(name, lambda row: with_system(row, prompt_of(name, required(row, name))))


def _instruction(row: dict[str, Any]) -> tuple[Message, ...]:
    """Instruction and input (Dolly: context) as one user's turn, with an empty line between; `history` before them."""
    text = text_of("instruction", required(row, "instruction"))
    for field in ("input", "context"):
        if row.get(field) is not None and text_of(field, row[field]).strip():
            text = f"{text}\n\n{row[field]}"
    earlier: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise wrong_type("history", history, "a list")
    for exchange in history:
        if not (isinstance(exchange, list) and len(exchange) == 2):
            raise BadRow("history", "a list", "has an entry that is not [question, answer]")
        question, answer = (text_of("history", part) for part in exchange)
        earlier += [Message("user", question), Message("assistant", answer)]
    return with_system(row, (*earlier, Message("user", text)))


INSTRUCTION = PromptField("instruction", _instruction)


def _checked(prompt: PromptField, row: dict[str, Any]) -> tuple[Message, ...]:
    found = prompt.read(row)
    check_prompt(prompt.name, found)
    return found


def prompt_alone(prompt: PromptField, row: dict[str, Any]) -> Parsed:
    """A prompt that waits for an answer."""
    return Parsed((PromptOnly(_checked(prompt, row)),))


# --- demonstrations ---


def answered(prompt: PromptField, answer: str, row: dict[str, Any]) -> Parsed:
    """A prompt, and its answer in the field `answer`, as text or as an assistant's turn."""
    found = _checked(prompt, row)
    text = _side(answer, required(row, answer), found)[-1].content
    return Parsed((Demonstration(found, answer_of(answer, text)),))


def seed_task(row: dict[str, Any]) -> Parsed:
    """An instruction with a list of `instances`, each an input and an output: one demonstration for each."""
    instances = required(row, "instances")
    if not isinstance(instances, list) or not instances:
        raise wrong_type("instances", instances, "a list with at least one entry")
    records: list[Record] = []
    for instance in instances:
        if not isinstance(instance, dict):
            raise wrong_type("instances: an entry", instance, "an object")
        one = {"instruction": required(row, "instruction"), **instance}
        records += answered(INSTRUCTION, "output", one).records
    return Parsed(tuple(records))


def conversation(field: str, row: dict[str, Any]) -> Parsed:
    """One demonstration per answer, with all turns before it as its prompt. A last turn of the user's is a prompt."""
    turns = turns_of(field, required(row, field))
    messages = with_system(row, tuple(turn.message for turn in turns))
    trained = [True] * (len(messages) - len(turns)) + [turn.trained for turn in turns]
    records: list[Record] = []
    left_out = 0
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if number == 0 or messages[number - 1].role != "user":
            raise BadRow(field, "a list", "has an assistant's turn that does not follow a user's")
        check_prompt(field, messages[:number])
        answer_of(f"{field}: an assistant's turn", message.content)
        if trained[number]:
            records.append(Demonstration(messages[:number], message.content))
        else:
            left_out += 1
    if messages[-1].role == "user":
        check_prompt(field, messages)
        records.append(PromptOnly(messages))
    elif messages[-1].role == "system":
        raise BadRow(field, "a list", "ends with a system turn")
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


def openai_pair(row: dict[str, Any]) -> Parsed:
    """OpenAI's preference format: messages in `input`, and two lists of messages that go on from there."""
    given = required(row, "input")
    if not isinstance(given, dict):
        raise wrong_type("input", given, "an object with messages")
    prompt = prompt_of("input.messages", given.get("messages"))
    _check_sides(row, OPENAI_SIDES)
    return _two_sides("input.messages", prompt, row, OPENAI_SIDES)


def ranked(prompt: PromptField, row: dict[str, Any]) -> Parsed:
    """A list of answers, the best first: every answer against every later one, n (n - 1) / 2 pairs."""
    found = _checked(prompt, row)
    name = next((name for name in RANKED if row.get(name) is not None), RANKED[0])
    value = required(row, name)
    if not isinstance(value, list) or len(value) < 2:
        raise wrong_type(name, value, "a list of two or more answers, the best first")
    names = [f"{name}[{number}]" for number in range(len(value))]
    answers = [answer_of(place, text_of(place, answer)) for place, answer in zip(names, value, strict=True)]
    ranks = combinations(range(len(answers)), 2)
    return Parsed(tuple(_differing(found, answers[i], answers[j], (names[i], names[j])) for i, j in ranks))


def _check_sides(row: dict[str, Any], sides: tuple[str, str]) -> None:
    for side in sides:
        if not isinstance(required(row, side), str | list | dict):
            raise wrong_type(side, row[side], "text or messages")


def _two_sides(field: str, prompt: tuple[Message, ...] | None, row: dict[str, Any], sides: tuple[str, str]) -> Parsed:
    """The prompt is all turns before the last on both sides, which must be the same; the last turns are the answers."""
    if prompt is not None:
        check_prompt(field, prompt)
    chosen, rejected = (_side(side, row[side], prompt) for side in sides)
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


def _side(field: str, value: Any, prompt: tuple[Message, ...] | None) -> tuple[Message, ...]:
    """A whole conversation: the prompt, then what `value` adds to it; a list of messages may repeat the prompt."""
    if isinstance(value, str):
        if prompt is None:
            turns = tuple(transcript_turns(field, value))
        else:
            turns = (*prompt, Message("assistant", text_of(field, value)))
    elif isinstance(value, list | dict):
        found = turns_of(field, value if isinstance(value, list) else [value])
        if found[-1].message.role == "assistant" and not found[-1].trained:
            raise BadRow(field, "a number", "has loss weight 0 on its last answer")
        turns = tuple(turn.message for turn in found)
        if prompt is not None and not _holds(turns, prompt):
            if turns[0].role != "assistant":
                raise BadRow(field, "a list", "is a conversation in which the prompt does not occur")
            turns = (*prompt, *turns)
    else:
        raise wrong_type(field, value, "text or messages")
    if turns[-1].role != "assistant":
        raise BadRow(field, "a list", "does not end with an assistant's turn")
    return turns


def _holds(turns: tuple[Message, ...], prompt: tuple[Message, ...]) -> bool:
    """Whether the prompt's turns stand together before the last turn, but for white space at their ends."""
    bare = [Message(turn.role, turn.content.strip()) for turn in turns[:-1]]
    wanted = [Message(turn.role, turn.content.strip()) for turn in prompt]
    return any(bare[start : start + len(wanted)] == wanted for start in range(len(bare) - len(wanted) + 1))
