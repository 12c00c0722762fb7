"""One pass over raw rows: what can be used, what cannot and why. Nothing of the rows stays in memory."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, TextIO

from pipeline.data.notes import FileNotes
from pipeline.data.readers import read_rows
from pipeline.data.recognition import SAMPLE, Rules, as_kind, readings, recognise, richer_shape
from pipeline.data.records import Record
from pipeline.data.refusals import refused_row
from pipeline.data.rows import Row
from pipeline.data.shapes import PROMPTS, SHAPES, Shape
from pipeline.data.sources import DataFile, find_data, other_files
from pipeline.data.turns import BadRow, type_of
from pipeline.errors import DataError
from pipeline.params.data import DataParams
from pipeline.progress import ProgressBar, console

SHOWN_REJECTS = 20
MOST_LOOKED_AT = 10_000  # rows in search of SAMPLE objects
MEGABYTE = 2**20
WATCHED = 20 * MEGABYTE  # files from this size on get a progress bar


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used: where it stands, which field, the type of its value, and why."""

    file: str
    line: int
    field: str
    type: str
    reason: str

    @property
    def kind(self) -> str:
        """What rejects are counted by."""
        return f"{self.field} {self.reason}"


@dataclass
class Tally:
    """What was met on the way through a source.

    records: usable ones by kind. left_out: answers with loss weight 0, and turns that do not give the kind wanted.
    shapes: usable rows by shape. rejects: by reason. shown: the first SHOWN_REJECTS of them.
    """

    rows: int = 0
    left_out: int = 0
    records: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    shown: list[Reject] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The counts as plain values, rejects by reason with the most frequent first."""
        return {
            "rows": self.rows,
            "rows_used": self.shapes.total(),
            "rejected": dict(self.rejects.most_common()),
            "shapes": dict(self.shapes),
            "left_out": self.left_out,
        }


def take_in_all(cfg: DataParams, keep: Callable[[tuple[Record, ...]], None], rejects: TextIO) -> dict[str, Tally]:
    """Every row of every source, judged; the tally of each.

    Raises:
        DataError: a source cannot be read, or too many of its rows cannot be used.
    """
    rules = _rules_of(cfg.sources, cfg.shape, cfg.expand_rankings)
    tallies = {
        kind: take_in(f"data.{kind}", path, kind, rules[kind], keep, rejects) for kind, path in cfg.sources.items()
    }
    for kind, tally in tallies.items():
        check_share(tally, f"data.{kind}", cfg.sources[kind], cfg.max_bad_share)
    return tallies


def _rules_of(kinds: Collection[str], shape: str, expand_rankings: bool) -> dict[str, Rules]:
    """What data.shape and data.expand_rankings say of each source: a shape's name concerns the source of its own kind.

    Raises:
        DataError: there is no source of that kind.
    """
    named = SHAPES[shape].kind if shape != "auto" else None
    if named is not None and named not in kinds:
        raise DataError(
            f"data.shape is {shape}, a shape of {named}, but data.{named} names no data; name a file there, or leave data.shape at auto."
        )
    return {kind: Rules(shape if kind == named else "auto", expand_rankings) for kind in kinds}


def take_in(
    key: str,
    path: str,
    wanted: str | None,
    rules: Rules,
    keep: Callable[[tuple[Record, ...]], None],
    rejects: TextIO | None = None,
) -> Tally:
    """Every row under `path`, judged; says which shape each file has.

    Args:
        key: the parameter that names the path, for messages.
        wanted: pairs, demonstrations or prompts; None for whatever the rows are.
        keep: is given the records of each usable row; may raise BadRow to refuse it.
        rejects: where rows that cannot be used are listed, one JSON object a line.

    Raises:
        DataError: a file is missing, cannot be read to its end, or has a shape that is not read.
    """
    tally = Tally()
    sources = find_data(key, path)
    if others := other_files(path):
        console.print(f"{path}: not data, so not read: {', '.join(others[:8])}{' …' * (len(others) > 8)}", markup=False)
    for data in sources:
        rows = _watched(read_rows(data), data) if isinstance(data, DataFile) else read_rows(data)
        first = _opening(rows)
        samples = [row.content for row in first if isinstance(row.content, dict)]
        shape = recognise(data.name, samples, wanted, rules)
        notes = FileNotes()
        rows_before, used_before = tally.rows, tally.shapes.total()
        for row in chain(first, rows):
            tally.rows += 1
            try:
                records, left_out = _judge(row, shape, wanted, named=rules.shape != "auto")
                keep(records)
            except BadRow as bad:
                reject = Reject(data.name, row.line, bad.field, bad.type, bad.reason)
                _count_reject(tally, reject, rejects)
                continue
            notes.add(row.content, shape, records)
            tally.left_out += left_out
            tally.records.update(type(record).__name__ for record in records)
            tally.shapes[shape.title] += 1
        read, used = tally.rows - rows_before, tally.shapes.total() - used_before
        _say(data.name, shape, read, used, notes)
    return tally


def _opening(rows: Iterator[Row]) -> list[Row]:
    """The rows by which a file's shape is told: up to the SAMPLE-th that is an object, but no more than MOST_LOOKED_AT."""
    found: list[Row] = []
    objects = 0
    for row in islice(rows, MOST_LOOKED_AT):
        found.append(row)
        objects += isinstance(row.content, dict)
        if objects == SAMPLE:
            break
    return found


def _judge(row: Row, shape: Shape | None, wanted: str | None, named: bool) -> tuple[tuple[Record, ...], int]:
    """The records of a row, and how many of its answers and turns are left out.

    Args:
        named: the user says that this is the rows' shape, whatever else they could be read as.

    Raises:
        BadRow: it cannot be used.
    """
    if row.fault is not None:
        raise BadRow("row", "text", row.fault)
    if not isinstance(row.content, dict):
        raise BadRow("row", type_of(row.content), f"is {type_of(row.content)}, not an object")
    if shape is None:
        raise BadRow("row", "an object", f"comes after {MOST_LOOKED_AT} rows of which none is an object")
    refused = refused_row(row.content)
    if refused is not None:
        raise BadRow("row", "an object", f"holds {refused.title}, which are not read")
    other = None if named else richer_shape(row.content, shape)
    if other is None and not shape.fits(row.content):
        others = [SHAPES[name] for name in readings(row.content)]
        other = next((other for other in others if other.kind != PROMPTS), None)
    if other is not None:
        raise BadRow("row", "an object", f"is of another shape ({other.title}) than its file ({shape.title})")
    parsed = shape.parse(row.content)
    records = as_kind(parsed, wanted)
    if not records and not parsed.left_out:
        raise BadRow("row", "an object", "has no answer")
    return records, parsed.left_out + len(parsed.records) - len(records)


def _count_reject(tally: Tally, reject: Reject, rejects: TextIO | None) -> None:
    tally.rejects[reject.kind] += 1
    if len(tally.shown) < SHOWN_REJECTS:
        tally.shown.append(reject)
    if rejects is not None:
        rejects.write(json.dumps(asdict(reject), ensure_ascii=False) + "\n")


def _say(name: str, shape: Shape | None, read: int, used: int, notes: FileNotes) -> None:
    title = shape.title if shape else "nothing that can be used"
    rejected = [f"{read - used:,} of them rejected"] * (used < read)
    words = "".join(f"; {note}" for note in (*rejected, *notes.lines()))
    console.print(f"{name}: {title}, {read:,} rows{words}", markup=False)


def _watched(rows: Iterator[Row], data: DataFile) -> Iterator[Row]:
    """The rows, with a progress bar over the file's megabytes where it is large."""
    size = data.path.stat().st_size
    if size < WATCHED:
        yield from rows
        return
    total = size // MEGABYTE
    done = 0
    with ProgressBar(f"reading {data.name}, MB", total, total // 10) as bar:
        for number, row in enumerate(rows, 1):
            yield row
            while done < min(row.position // MEGABYTE, total):
                bar.advance(done, rows=number)
                done += 1


def check_share(tally: Tally, key: str, path: str, max_bad_share: float) -> None:
    """Says which rows cannot be used.

    Raises:
        DataError: they are more than `max_bad_share` allows, or nothing is left.
    """
    bad = tally.rejects.total()
    for reject in tally.shown:
        console.print(f"{reject.file}:{reject.line}: {reject.kind}", markup=False, style="yellow")
    if bad > len(tally.shown):
        console.print(f"… and {bad - len(tally.shown)} more rows that cannot be used", markup=False)
    if not tally.rows:
        raise DataError(f"{key} {path!r} has no row at all.")
    if not tally.records and tally.left_out:
        raise DataError(f"{key} {path!r} has no answer that is trained on: the loss weight of all is 0.")
    if not tally.records:
        raise DataError(f"{key} {path!r} has no row that can be used ({bad} of {tally.rows} rejected).")
    if bad / tally.rows > max_bad_share:
        kind, times = tally.rejects.most_common(1)[0]
        raise DataError(
            f"{bad} of {tally.rows} rows of {path} cannot be used ({bad / tally.rows:.1%}; most often: {kind}, {times} times), "
            f"more than data.max_bad_share {max_bad_share:g}; mend the rows, or raise data.max_bad_share to go on without them."
        )
