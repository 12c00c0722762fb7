"""The files between `prepare` and the later stages: one pair per line, prompts as messages."""

import json
from collections.abc import Iterable
from pathlib import Path

from pipeline.data.records import Message, Pair


def write_pairs(file: Path, pairs: Iterable[Pair]) -> None:
    """One JSON object per pair."""
    with file.open("w", encoding="utf-8") as stream:
        for pair in pairs:
            prompt = [{"role": message.role, "content": message.content} for message in pair.prompt]
            stream.write(
                json.dumps({"prompt": prompt, "chosen": pair.chosen, "rejected": pair.rejected}, ensure_ascii=False)
                + "\n"
            )


def read_pairs(file: Path) -> list[Pair]:
    """What `write_pairs` wrote."""
    pairs = []
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            prompt = tuple(Message(turn["role"], turn["content"]) for turn in row["prompt"])
            pairs.append(Pair(prompt, row["chosen"], row["rejected"]))
    return pairs
