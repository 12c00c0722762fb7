"""The files between `prepare` and the later stages: one record per line, prompts as messages."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record


def to_line(record: Record) -> str:
    """A record as one line of JSON."""
    row: dict[str, Any] = {"prompt": [{"role": turn.role, "content": turn.content} for turn in record.prompt]}
    if isinstance(record, Pair):
        row |= {"chosen": record.chosen, "rejected": record.rejected}
    elif isinstance(record, Demonstration):
        row |= {"answer": record.answer}
    return json.dumps(row, ensure_ascii=False) + "\n"


def from_line(line: str) -> Record:
    """What `to_line` wrote."""
    row = json.loads(line)
    prompt = tuple(Message(turn["role"], turn["content"]) for turn in row["prompt"])
    if "chosen" in row:
        return Pair(prompt, row["chosen"], row["rejected"])
    if "answer" in row:
        return Demonstration(prompt, row["answer"])
    return PromptOnly(prompt)


def write_records(file: Path, records: Iterable[Record]) -> int:
    """One line per record; how many."""
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(to_line(record))
            count += 1
    return count


def read_pairs(file: Path) -> list[Pair]:
    """The pairs of a part; any other record there is a fault of ours."""
    return [record for record in _records(file) if isinstance(record, Pair)]


def read_demonstrations(file: Path) -> list[Demonstration]:
    """The demonstrations of a part."""
    return [record for record in _records(file) if isinstance(record, Demonstration)]


def read_prompts(file: Path) -> list[PromptOnly]:
    """The prompts of a part."""
    return [record for record in _records(file) if isinstance(record, PromptOnly)]


def _records(file: Path) -> Iterator[Record]:
    with file.open(encoding="utf-8") as stream:
        yield from map(from_line, stream)
