"""What is worth saying of a file when it has been read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.recognition import shown_names, unread_fields
from pipeline.data.records import PromptOnly, Record
from pipeline.data.shapes import Shape

MOST_NAMES = 1000  # of fields not read; a damaged file may have as many as it has rows


@dataclass
class FileNotes:
    """unread: fields that are not read. repeating: of `records`, those with an answer that begins with its prompt's own text."""

    unread: set[str] = field(default_factory=set)
    records: int = 0
    repeating: int = 0

    def add(self, row: dict[str, Any], shape: Shape, records: Iterable[Record]) -> None:
        """Notes what there is to note of a usable row."""
        if len(self.unread) < MOST_NAMES:
            self.unread |= unread_fields(row, shape)
        for record in records:
            self.records += 1
            self.repeating += _repeats_prompt(record)

    def lines(self) -> list[str]:
        """The notes in words."""
        lines = []
        if self.unread:
            lines.append(f"fields not read: {', '.join(shown_names(sorted(self.unread)))}")
        if self.repeating * 2 > self.records:
            lines.append(
                "WARNING: its answers begin with their prompt's own text, which would be learned; cut it off the answers"
            )
        return lines


def _repeats_prompt(record: Record) -> bool:
    if isinstance(record, PromptOnly):
        return False
    answers = (getattr(record, name, "") for name in ("answer", "chosen", "rejected"))
    return any(answer.startswith(record.prompt[-1].content) for answer in answers)
