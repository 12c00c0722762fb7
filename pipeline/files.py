"""Hashes of files and folders; files that are written whole or not at all, equal content giving equal bytes."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import processes
from pipeline.errors import StorageError

PARTIAL = ".partial"  # the end of a name: not written to its end
SPARE = 2**20  # bytes that are left free beside a file: for folders, and for what others write


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


def write_bytes(file: Path, content: bytes) -> None:
    """Puts a whole file in the place of the one before: a crash, or a full disk, leaves one or the other.

    Of several processes the main one writes.

    Raises:
        StorageError: there is no room, or the folder cannot be written to; the file is as it was.
    """
    if not processes.is_main():
        return
    partial = file.with_name(file.name + PARTIAL)
    with storage(file, len(content)):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def storage(place: Path, size: int) -> Iterator[None]:
    """Around the writing of `size` bytes to a file or folder: room is looked for first, and what the system says is put in words.

    Raises:
        StorageError: there is no room, or the system refuses.
    """
    free = free_bytes(place)
    needed = f"{place} needs {megabytes(size)} and its disk has {megabytes(free)} free"
    if size + SPARE > free:
        raise StorageError(f"{needed}; free some, and run the same command again: it goes on where it was.")
    try:
        yield
    except OSError as error:
        raise StorageError(f"{place} cannot be written: {error.strerror or error}; {needed}.") from error


def free_bytes(place: Path) -> int:
    """Bytes that may still be written beside `place`, which need not be there yet."""
    there = next(folder for folder in place.absolute().parents if folder.exists())
    return shutil.disk_usage(there).free


def megabytes(size: int) -> str:
    """For people."""
    return f"{size / 1e6:.3g} MB"


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(file, text.encode("utf-8"))


def write_json(file: Path, content: Any) -> None:
    """Indented, sorted JSON; floats to ten digits, as more would only be noise in a diff.

    Raises:
        ValueError: a number is NaN or infinite.
        StorageError: see `write_bytes`.
    """
    write_text(
        file, json.dumps(_rounded(content), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    )


def write_tsv(file: Path, rows: list[dict[str, float | str]]) -> None:
    """A table with a header; all columns that any row has, in order of appearance, empty where a row has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["\t".join(columns)]
    for row in rows:
        lines.append("\t".join(_cell(row.get(name, "")) for name in columns))
    write_text(file, "\n".join(lines) + "\n")


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
