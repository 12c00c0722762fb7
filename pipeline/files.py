"""Hashes of files and folders, and small text files written so that equal content gives equal bytes."""

import hashlib
import json
from pathlib import Path
from typing import Any


def hash_file(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_path(path: Path) -> str:
    """SHA-256 of a file, or of a folder's file names and contents, byte code left out."""
    if path.is_file():
        return hash_file(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path).as_posix()} {hash_file(file)}\n".encode())
    return digest.hexdigest()


def write_json(file: Path, content: Any) -> None:
    """Indented, sorted JSON; floats to ten digits, as more would only be noise in a diff.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps(_rounded(content), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
        encoding="utf-8",
    )


def write_tsv(file: Path, rows: list[dict[str, float | str]]) -> None:
    """A table with a header; all columns that any row has, in order of appearance, empty where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["\t".join(columns)]
    for row in rows:
        lines.append("\t".join(_cell(row.get(name, "")) for name in columns))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    return " ".join(str(value).split())


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        return float(f"{content:.10g}")
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_rounded(value) for value in content]
    return content
