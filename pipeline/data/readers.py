"""Files -> rows, each with the place it came from. Nothing is judged here but whether a row can be read at all."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


@dataclass(frozen=True)
class Row:
    """One row: its file's name, its line (in a .json array: its number), and its content or why it has none."""

    file: str
    line: int
    content: Any = None
    fault: str | None = None


def data_files(path: str) -> list[Path]:
    """The data files that `path` names, in name order.

    Raises:
        DataError: there is no such file, or the folder holds none that can be read.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise DataError(f"data.pairs is {path!r} but that folder has no file ending in {', '.join(SUFFIXES)}.")
        return files
    if not place.is_file():
        raise DataError(
            f"data.pairs is {path!r} but there is no such file or folder; relative paths start at the project's root."
        )
    if not place.name.endswith(SUFFIXES):
        raise DataError(f"data.pairs is {path!r} but only files ending in {', '.join(SUFFIXES)} can be read.")
    return [place]


def read_rows(file: Path) -> Iterator[Row]:
    """All rows of one file, the unreadable ones with a fault.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    try:
        if file.name.endswith(".json"):
            yield from _json_array(file)
        else:
            yield from _json_lines(file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read to its end: {error}.") from None


def _json_array(file: Path) -> Iterator[Row]:
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}. If it has one object per line, name it .jsonl.") from None
    if not isinstance(content, list):
        raise DataError(f"{file} must hold a list of rows but holds a {type(content).__name__}.")
    for number, row in enumerate(content, 1):
        yield Row(file.name, number, row)


def _json_lines(file: Path) -> Iterator[Row]:
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                yield Row(file.name, number, json.loads(line.decode("utf-8")))
            except (ValueError, RecursionError) as error:
                yield Row(file.name, number, fault=f"not valid JSON ({type(error).__name__})")
