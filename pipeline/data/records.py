"""Rows of the shapes that people have -> preference pairs, or the reason why not.

Shapes: `prompt`, `chosen`, `rejected` as strings; the same with messages; `conversations` with `chosen` and `rejected`
turns (ShareGPT); two whole transcripts in the form of Anthropic's HH data.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
HH_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one conversation, the first preferred."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


class BadRow(Exception):
    """A row that cannot be used: the field concerned and the reason."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def prompt_key(prompt: tuple[Message, ...]) -> str:
    """SHA-256 of the prompt with case and spacing normalised."""
    turns = [[message.role, " ".join(message.content.lower().split())] for message in prompt]
    return hashlib.sha256(json.dumps(turns, ensure_ascii=False).encode()).hexdigest()


def to_pair(row: Any) -> tuple[Pair, str]:
    """The pair in a row, and the name of the row's shape.

    Raises:
        BadRow: the row has no shape we know, or its content cannot be used.
    """
    if not isinstance(row, dict):
        raise BadRow("row", f"is {_kind(row)}, not an object")
    for field in ("chosen", "rejected"):
        if field not in row:
            raise BadRow(field, "is missing")
        if row[field] is None or not isinstance(row[field], str | list | dict):
            raise BadRow(field, f"is {_kind(row[field])}, not text or messages")
    if "conversations" in row:
        prompt = _messages("conversations", row["conversations"])
        pair, shape = (
            Pair(prompt, _answer("chosen", row["chosen"]), _answer("rejected", row["rejected"])),
            "ShareGPT pairs",
        )
    elif "prompt" not in row:
        pair, shape = _two_transcripts(row)
    elif isinstance(row["chosen"], list) and isinstance(row["rejected"], list) and len(row["chosen"]) > 1:
        pair, shape = _two_conversations(row["chosen"], row["rejected"]), "pairs of conversations"
    else:
        pair = Pair(_prompt(row["prompt"]), _answer("chosen", row["chosen"]), _answer("rejected", row["rejected"]))
        shape = "prompt with chosen and rejected"
    return _checked(pair), shape


def _checked(pair: Pair) -> Pair:
    if not pair.prompt or pair.prompt[-1].role != "user":
        raise BadRow("prompt", "does not end with a user's turn")
    for message in pair.prompt:
        if not message.content.strip():
            raise BadRow("prompt", f"has an empty {message.role} turn")
    for field in ("chosen", "rejected"):
        if not getattr(pair, field).strip():
            raise BadRow(field, "is empty")
    if pair.chosen == pair.rejected:
        raise BadRow("rejected", "is the same as chosen")
    return pair


def _two_transcripts(row: dict) -> tuple[Pair, str]:
    if isinstance(row["chosen"], list) and isinstance(row["rejected"], list):
        return _two_conversations(row["chosen"], row["rejected"]), "pairs of conversations"
    if not (isinstance(row["chosen"], str) and isinstance(row["rejected"], str)):
        raise BadRow("prompt", "is missing")
    sides = [_hh_turns(field, row[field]) for field in ("chosen", "rejected")]
    return _parted(*sides), "HH transcripts"


def _hh_turns(field: str, text: str) -> list[Message]:
    pieces = HH_TURN.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        raise BadRow("prompt", f"is missing, and {field} is no '\\n\\nHuman: … \\n\\nAssistant: …' transcript")
    return [
        Message(ROLES[role.lower()], content.strip()) for role, content in zip(pieces[1::2], pieces[2::2], strict=True)
    ]


def _two_conversations(chosen: list, rejected: list) -> Pair:
    return _parted(list(_messages("chosen", chosen)), list(_messages("rejected", rejected)))


def _parted(chosen: list[Message], rejected: list[Message]) -> Pair:
    """The prompt is all turns before the last on both sides, which must be the same; the last turns are the answers."""
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1].role != "assistant":
            raise BadRow(field, "does not end with an assistant's turn")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("rejected", "differs from chosen before the last answer")
    return Pair(tuple(chosen[:-1]), chosen[-1].content, rejected[-1].content)


def _prompt(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", value),)
    return _messages("prompt", value)


def _answer(field: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    messages = _messages(field, value if isinstance(value, list) else [value])
    if len(messages) != 1 or messages[0].role != "assistant":
        raise BadRow(field, "must be one assistant's turn")
    return messages[0].content


def _messages(field: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRow(field, f"is {_kind(value)}, not a list of messages")
    messages = []
    for turn in value:
        if not isinstance(turn, dict):
            raise BadRow(field, f"has a turn that is {_kind(turn)}, not an object")
        role = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise BadRow(field, f"has a turn with role {role!r}")
        if not isinstance(content, str):
            raise BadRow(field, f"has a turn whose content is {_kind(content)}, not text")
        messages.append(Message(ROLES[role.lower()], content))
    return tuple(messages)


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
