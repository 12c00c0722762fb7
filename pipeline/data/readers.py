"""Files -> rows. Nothing is judged here but whether a row can be read at all.

Memory stays flat: rows come one at a time, and a row longer than MAX_ROW is not kept.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow
import pyarrow.parquet

from pipeline.data.hub import hub_rows
from pipeline.data.json_arrays import array_items
from pipeline.data.rows import JSON, MAX_ROW, RepeatedField, Row
from pipeline.data.sources import DataFile, HubData
from pipeline.errors import DataError

# what a file begins with that is not what its name says, by the name's ending
NOT_AS_NAMED = [
    (
        ("jsonl", "json", "csv"),
        re.compile(rb"\x1f\x8b"),
        "is compressed; let its name end in .jsonl.gz, or uncompress it",
    ),
    (
        ("jsonl", "json", "csv", "parquet"),
        re.compile(rb"version https://git-lfs"),
        "is a pointer of git LFS, and the data are not here; fetch them with git lfs pull",
    ),
    (("jsonl",), re.compile(rb"\[\s*\{"), "is one JSON list and not one row per line; let its name end in .json"),
    (
        ("jsonl",),
        re.compile(rb"\{[ \t\r]*\n"),
        "has rows over many lines; put each into one line, as with jq -c",
    ),
    (("csv",), re.compile(rb"[^,\n]*[;\t][^,\n]*(\n|\Z)"), "is separated by semicolons or tabs; separate it by commas"),
]
BOM = b"\xef\xbb\xbf"
NULLS = ("NaN", "nan", "NULL", "null", "<NA>")  # how programs write into a cell that nothing is there
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_rows(data: DataFile | HubData) -> Iterator[Row]:
    """All rows, those that cannot be read with a fault.

    Raises:
        DataError: the file as a whole cannot be read, or not to its end.
    """
    if isinstance(data, HubData):
        yield from hub_rows(data)
        return
    suffix = data.path.name.lower().rpartition(".")[2]
    try:
        if suffix == "parquet":
            with data.path.open("rb") as raw:
                _check_name(suffix, raw.read(100), data.name)
            yield from _parquet(data.path)
            return
        with data.path.open("rb") as raw:
            if suffix == "gz":
                with gzip.open(raw, "rb") as stream:
                    _start(stream, data.name)
                    yield from _json_lines(stream, raw)
                return
            start = _start(raw, data.name)
            _check_name(suffix, start, data.name)
            if suffix == "csv":
                yield from _csv(raw)
            elif suffix == "json" and start.startswith(b"["):
                yield from _json_array(raw)
            else:  # also a .json that has one object per line, as many have
                if suffix == "json":
                    _check_first_line(raw)
                yield from _json_lines(raw, raw)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        OverflowError,
        RecursionError,
        pyarrow.ArrowException,
        csv.Error,
    ) as error:
        words = " ".join(str(error).split())[:300]
        raise DataError(f"{data.name} cannot be read to its end: {words}. Mend the file, or leave it out.") from None


def _start(stream: BinaryIO, name: str) -> bytes:
    """The first bytes after byte order mark and white space; the stream is then at its start again."""
    start = stream.read(4096)
    stream.seek(0)
    if start.startswith(UTF_16) or b"\0" in start[:2]:
        raise DataError(
            f"{name} is UTF-16 or UTF-32 but must be UTF-8; convert it, as with iconv -f utf-16 -t utf-8 {name} > new file."
        )
    return start.removeprefix(BOM).lstrip()


def _check_name(suffix: str, start: bytes, name: str) -> None:
    for suffixes, begins, hint in NOT_AS_NAMED:
        if suffix in suffixes and begins.match(start):
            raise DataError(f"{name} {hint}.")


def _check_first_line(stream: BinaryIO) -> None:
    """A .json that is no list must have its rows as lines; one object over many lines would be as many rejects.

    Raises:
        ValueError: the first line is no whole row.
    """
    try:
        json.loads(stream.readline(MAX_ROW).removeprefix(BOM))
    except ValueError:
        raise ValueError("it is neither a list of rows nor has it one row per line") from None
    stream.seek(0)


def _json_lines(stream: BinaryIO, raw: BinaryIO) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_ROW):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) >= MAX_ROW and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_ROW)) and not rest.endswith(b"\n"):
                pass
            yield Row(number, fault=f"is longer than {MAX_ROW} bytes", position=raw.tell())
        elif line.strip():
            yield _json_line(number, line, raw.tell())


def _json_line(number: int, line: bytes, position: int) -> Row:
    try:
        return Row(number, JSON.decode(line.decode("utf-8")), position=position)
    except UnicodeDecodeError:
        return Row(number, fault="is not UTF-8", position=position)
    except RecursionError:
        return Row(number, fault="is nested too deep", position=position)
    except RepeatedField as error:
        return Row(number, fault=str(error), position=position)
    except ValueError:
        return Row(number, fault="is not valid JSON", position=position)


def _text(raw: BinaryIO, newline: str | None) -> io.TextIOWrapper:
    """The stream as text. Bytes that are not UTF-8 become lone surrogates, so that only the rows with them are refused."""
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _json_array(raw: BinaryIO) -> Iterator[Row]:
    for number, content in enumerate(array_items(_text(raw, None)), 1):
        yield Row(number, content, position=raw.tell())


def _csv(raw: BinaryIO) -> Iterator[Row]:
    """Rows of a comma-separated file whose first line names the fields. All cells are text."""
    csv.field_size_limit(MAX_ROW)
    reader = csv.reader(_text(raw, ""), strict=True)
    fields = [field.strip() for field in next(reader, [])]
    _check_fields(fields, "its first line")
    end = reader.line_num
    for cells in reader:
        line, end = end + 1, reader.line_num
        if len(cells) == len(fields):
            yield Row(
                line,
                {field: None if cell in NULLS else cell for field, cell in zip(fields, cells, strict=True)},
                position=raw.tell(),
            )
        elif cells:
            yield Row(line, fault="has another number of cells than the first line", position=raw.tell())


def _check_fields(fields: list[str], where: str) -> None:
    if len(set(fields)) != len(fields):
        raise ValueError(f"{where} names a field twice")


def _parquet(path: Path) -> Iterator[Row]:
    size = path.stat().st_size
    with pyarrow.parquet.ParquetFile(path) as table:
        total, number = table.metadata.num_rows, 0
        _check_fields(table.schema_arrow.names, "it")
        for batch in table.iter_batches(batch_size=1000):
            for content in batch.to_pylist():
                number += 1
                yield Row(number, content, position=size * number // total)
    if number != total:
        raise ValueError(f"it says that it has {total} rows but {number} are there")
