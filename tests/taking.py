"""Short ways through the intake for tests."""

import json
from pathlib import Path
from typing import Any

from pipeline.data.intake import Tally, take_in
from pipeline.data.recognition import Rules
from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def system(text: str) -> Message:
    return Message("system", text)


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> Pair:
    return Pair((user(prompt),), chosen, rejected)


def demonstration(prompt: str, answer: str = "yes") -> Demonstration:
    return Demonstration((user(prompt),), answer)


def prompt_only(prompt: str) -> PromptOnly:
    return PromptOnly((user(prompt),))


def take(path: Path, wanted: str | None = None, **rules: Any) -> tuple[list[Record], Tally]:
    """All records under `path`, and the tally."""
    records: list[Record] = []
    return records, take_in("data.test", str(path), wanted, Rules(**rules), records.extend)


def write_rows(file: Path, *rows: Any) -> Path:
    """A .jsonl file of these rows."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def chat(*texts: str) -> list[dict[str, str]]:
    """User's and assistant's turns by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def sharegpt(*texts: str) -> list[dict[str, str]]:
    """The same as ShareGPT has it."""
    names = ("human", "gpt")
    return [{"from": names[number % 2], "value": text} for number, text in enumerate(texts)]
