"""What a row of data is to the stages: a pair, a demonstration, or a prompt alone; and the keys of a prompt."""

import hashlib
import json
import re
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache


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


@dataclass(frozen=True)
class Demonstration:
    """A conversation and the answer to imitate."""

    prompt: tuple[Message, ...]
    answer: str


@dataclass(frozen=True)
class PromptOnly:
    """A conversation without an answer."""

    prompt: tuple[Message, ...]


Record = Pair | Demonstration | PromptOnly


def as_demonstration(record: Pair | Demonstration) -> Demonstration:
    """A demonstration as it is; of a pair the chosen answer."""
    return Demonstration(record.prompt, record.chosen) if isinstance(record, Pair) else record


def prompt_key(prompt: tuple[Message, ...]) -> str:
    """SHA-256 of the prompt with case and spacing normalised: the prompt's name in ranking and in sampling noise."""
    return _hash([[message.role, message.content.lower()] for message in prompt])


def group_key(prompt: tuple[Message, ...]) -> str:
    """The same with Unicode's compatible forms made one too, as full-width letters and ligatures: equal keys, one group."""
    return _hash([[message.role, _folded(message.content)] for message in prompt])


def _folded(text: str) -> str:
    if text.isascii():
        return text.casefold()
    # normalising takes time by the square of a run of marks; Unicode's stream-safe form (UAX 15) parts long runs so
    text = _long_runs_of_marks().sub("\\g<0>\u034f", text)
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@cache
def _long_runs_of_marks() -> re.Pattern[str]:
    marks = (chr(code) for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code)))
    return re.compile(f"[{''.join(marks)}]{{30}}")


def _hash(turns: list[list[str]]) -> str:
    spaced = [[role, " ".join(text.split())] for role, text in turns]
    return hashlib.sha256(json.dumps(spaced, ensure_ascii=False).encode()).hexdigest()
