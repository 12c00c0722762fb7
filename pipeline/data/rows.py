"""A row as it lies in a file."""

import json
from collections import Counter
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


class RepeatedField(ValueError):
    """An object names a field twice: which of the two values is meant cannot be known."""


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        twice = Counter(name for name, _ in fields).most_common(1)[0][0]
        raise RepeatedField(f"names the field {twice[:40]!a} twice")
    return found


def _constant(name: str) -> float | None:
    """NaN is how pandas writes that nothing is there."""
    return None if name == "NaN" else float(name)


JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
