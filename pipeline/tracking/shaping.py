"""Values as MLflow takes them, and its errors in one line. Nothing of MLflow is known here."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from pipeline.masking import masked

FOREIGN_TO_NAMES = re.compile(r"[^\w\-. :/]")
SHOWN = 200  # characters of a value that is too long
Item = TypeVar("Item")


def short(value: str, limit: int) -> str:
    """A value within a limit; a longer one by its hash and its beginning."""
    return value if len(value) <= limit else f"sha256 {digest(value)}, {len(value)} characters: {value[:SHOWN]}…"


def name_of(name: str, limit: int) -> str:
    """A name that MLflow takes: one odd name would cost the whole batch. Equal names stay equal."""
    parts = FOREIGN_TO_NAMES.sub("_", name).split("/")
    name = "/".join(part if part.strip(".") else "_" for part in parts)  # neither a/../b nor a//b
    return name if len(name) <= limit else f"{name[: limit - 17]}.{digest(name)}"


def digest(text: str) -> str:
    """16 characters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Slices of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


def first_line(error: BaseException) -> str:
    """The error's kind and its first line that says something, short, without secrets."""
    lines = str(error).strip().splitlines() or ["no message"]
    return masked(f"{type(error).__name__}: {lines[0][:200]}")
