"""Which shape a file has, told by its first rows."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pipeline.data.parsing import Parsed
from pipeline.data.records import Pair, PromptOnly, Record, as_demonstration
from pipeline.data.refusals import LAST_REFUSED, RANKINGS, Refusal, may_be_answers, refused_answers, refused_row
from pipeline.data.shapes import DEMONSTRATIONS, KINDS, PAIRS, PROMPTS, SHAPES, Shape
from pipeline.data.turns import TURN_FIELDS, BadRow, first_there
from pipeline.errors import DataError

SAMPLE = 100  # rows of a file that are looked at


@dataclass(frozen=True)
class Rules:
    """What the user says of the files: a shape's name or auto, and whether ranked answers are made into pairs."""

    shape: str = "auto"
    expand_rankings: bool = False


LACKS = {PAIRS: "rejected answers to compare with", DEMONSTRATIONS: "answers to learn from"}


def readings(row: dict[str, Any]) -> list[str]:
    """The names of the shapes that a row can be read as.

    Of two, one of which reads all that the other reads and more, only that one counts; and a prompt alone is a reading only
    where there is no other.
    """
    fitting = {name: shape.used(row) for name, shape in SHAPES.items() if shape.fits(row)}
    largest = [name for name, used in fitting.items() if not any(used < other for other in fitting.values())]
    richer = [name for name in largest if SHAPES[name].kind != PROMPTS]
    return richer or largest


def refusal(row: dict[str, Any], wanted: str | None, rules: Rules) -> Refusal | None:
    """Why rows like this are not read; None where nothing speaks against it."""
    always = refused_row(row)
    if always is not None:
        return always
    found = readings(row)
    named = rules.shape in found and not rules.shape.endswith("-ranked")
    if not rules.expand_rankings and not named and any(name.endswith("-ranked") for name in found):
        return RANKINGS
    if rules.shape == "auto" and wanted != PROMPTS and all(SHAPES[name].kind == PROMPTS for name in found):
        found_apart = refused_answers(row)
        if found_apart is not None:
            return found_apart
    if not found:
        return next((why for field, why in LAST_REFUSED if row.get(field) is not None), None)
    return None


def recognise(file: str, rows: list[dict[str, Any]], wanted: str | None, rules: Rules) -> Shape | None:
    """The shape of a file whose first rows these are; None where it has no row that is an object.

    Args:
        wanted: the kind of records that the file is for; None where any will do.

    Raises:
        DataError: the shape is not known, is refused, is ambiguous, is not the one named, or has nothing of the kind wanted.
    """
    if not rows:
        return None
    refused = Counter(why for row in rows if (why := refusal(row, wanted, rules)))
    if refused.total() * 2 > len(rows):
        why = refused.most_common(1)[0][0]
        raise DataError(f"{file} holds {why.title}, which are not read: {why.remedy}.")
    votes = Counter(name for row in rows for name in readings(row))
    shape = SHAPES[_named(file, rows, rules.shape) if rules.shape != "auto" else _elected(file, rows, votes)]
    if wanted is not None and KINDS.index(shape.kind) > KINDS.index(wanted):
        unread = shown_names(sorted(set().union(*(unread_fields(row, shape) for row in rows))))
        beside = f" (not read: {', '.join(unread)})" if unread else ""
        raise DataError(
            f"{file} is for data.{wanted} but holds {shape.title}{beside}: it has no {LACKS[wanted]}; "
            f"data.{shape.kind} is where it belongs."
        )
    if wanted is None and shape.kind == PROMPTS and rules.shape == "auto":
        _check_no_answers(file, rows, shape)
    return shape


def _check_no_answers(file: str, rows: list[dict[str, Any]], shape: Shape) -> None:
    """Prompts are taken for prompts alone only where no other field may be their answer."""
    alone = [row for row in rows if shape.fits(row) and richer_shape(row, shape) is None]
    found = sorted({field for row in alone for field in may_be_answers(row, row.keys() - shape.used(row))})
    if found:
        raise DataError(
            f"{file} holds {shape.title}, but beside them {', '.join(shown_names(found))}, which may be answers under names that are not "
            "known; rename them to chosen and rejected, or one of them to completion (of an instruction: output; of a question: "
            f"answer), or where they are no answers say so with the shape {name_of(shape)}."
        )


def name_of(shape: Shape) -> str:
    """The name by which data.shape knows a shape."""
    return next(name for name, known in SHAPES.items() if known is shape)


def richer_shape(row: dict[str, Any], shape: Shape) -> Shape | None:
    """A shape that the row can be read as and that says more of it: pairs say more than demonstrations, these than prompts."""
    richer = (other for other in SHAPES.values() if KINDS.index(other.kind) < KINDS.index(shape.kind))
    return next((other for other in richer if other.fits(row)), None)


def _named(file: str, rows: list[dict[str, Any]], name: str) -> str:
    if not any(SHAPES[name].fits(row) for row in rows):
        raise DataError(
            f"{file} cannot be read as {name}: its rows have the fields {_fields(rows)}; "
            "leave data.shape at auto, or name another shape."
        )
    return name


def _elected(file: str, rows: list[dict[str, Any]], votes: Counter[str]) -> str:
    """The reading that most rows have. Rows of other shapes become rejects; a draw is the user's to settle."""
    if not votes:
        inner = [field for field, value in rows[0].items() if _holds_rows(value)] if len(rows) == 1 else []
        if inner:
            raise DataError(
                f"{file} is one object whose rows are in {shown_names(inner)[0]}; bring that list alone, as .json."
            )
        raise DataError(
            f"{file} has a shape that is not known: its rows have the fields {_fields(rows)}. "
            f"Known shapes: {', '.join(SHAPES)}; rename the fields to those of one (docs/data_shapes.md lists them)."
        )
    most = max(votes.values())
    best = sorted((name for name, count in votes.items() if count == most), key=list(SHAPES).index)
    best = [name for name in best if _reads_any(SHAPES[name], rows)] or best
    richest = best[0]
    rivals = [name for name in best[1:] if not _say_the_same(SHAPES[richest], SHAPES[name], rows)]
    if rivals:
        both = " and ".join(f"{SHAPES[name].title} (data.shape: {name})" for name in (richest, *rivals))
        raise DataError(
            f"{file} is ambiguous: its rows, with the fields {_fields(rows)}, can be read as {both}; "
            "name one of them in data.shape, or leave the other's fields out."
        )
    return richest


def _holds_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and bool(readings(value[0]))


def _reads_any(shape: Shape, rows: list[dict[str, Any]]) -> bool:
    """Whether the fields of any row hold what the shape has in them, and not only have the same names."""
    for row in rows:
        try:
            shape.parse(row)
        except BadRow:
            continue
        return True
    return False


def _say_the_same(richer: Shape, poorer: Shape, rows: list[dict[str, Any]]) -> bool:
    """Whether what `richer` reads of the rows is also in what `poorer` reads, as in data that repeat the chosen answer."""
    compared = False
    for row in rows:
        try:
            ours, theirs = (
                {_last_exchange(record) for record in as_kind(shape.parse(row), poorer.kind)}
                for shape in (richer, poorer)
            )
        except BadRow:
            continue  # the row says nothing of how the two agree
        if not ours <= theirs:
            return False
        compared = True
    return compared


def _last_exchange(record: Record) -> tuple[str, ...]:
    """The last turn of the prompt and the answers, without the context before, which not all fields repeat."""
    answers = (getattr(record, name, "") for name in ("answer", "chosen", "rejected"))
    return tuple(text.strip() for text in (record.prompt[-1].content, *answers))


def as_kind(parsed: Parsed, wanted: str | None) -> tuple[Record, ...]:
    """The records as the kind wanted: of a pair the chosen answer, of a demonstration the prompt; what has too little goes."""
    if wanted is None:
        return parsed.records
    if wanted == PAIRS:
        return tuple(record for record in parsed.records if isinstance(record, Pair))
    if wanted == PROMPTS:
        return tuple(PromptOnly(record.prompt) for record in parsed.records)
    return tuple(as_demonstration(record) for record in parsed.records if not isinstance(record, PromptOnly))


def unread_fields(row: dict[str, Any], shape: Shape) -> set[str]:
    """The fields of a row that the shape does not read, and those of its turns that are not; null ones left out."""
    used = shape.used(row)
    unread = {field for field in row.keys() - used if row[field] is not None}
    for field in used:
        if isinstance(row[field], list):
            turns = (turn for turn in row[field] if isinstance(turn, dict) and first_there(turn, "role", "from"))
            unread |= {
                f"{field}[].{key}" for turn in turns for key in turn.keys() - TURN_FIELDS if turn[key] is not None
            }
    return unread


def _fields(rows: list[dict[str, Any]]) -> str:
    return ", ".join(shown_names(dict.fromkeys(field for row in rows for field in row))) or "(none)"


def shown_names(names: Collection[str]) -> list[str]:
    """Field names fit to be printed, whatever a damaged file has for names; the first few."""
    shown = [f"{name:.40}".encode(errors="replace").decode() for name in list(names)[:12]]
    return [*shown, f"{len(names) - 12} more"] if len(names) > 12 else shown
