"""A row as it lies in a file."""

from dataclasses import dataclass
from typing import Any

MAX_ROW = 64 * 2**20  # characters; a longer row is no conversation, and reading it would not keep memory flat


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the line it begins in (where a format has no lines, its number), and its content or why it has none.

    position: bytes of the file read so far, for a progress bar.
    """

    line: int
    content: Any = None
    fault: str | None = None
    position: int = 0
