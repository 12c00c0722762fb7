"""2,000 files damaged at random, from a seed: each gives a clean result or one clean error, in time, and loses nothing."""

import csv
import gzip
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.intake import check_share, take_in
from pipeline.data.pool import Pool
from pipeline.data.recognition import Rules
from pipeline.errors import DataError

FILES = 2000
SECONDS_EACH = 5

Rows = list[Any]

MAKERS: list[Callable[[int], dict[str, Any]]] = [
    lambda n: {"prompt": f"Frage {n}?", "chosen": f"jä {n}", "rejected": "nein"},
    lambda n: {"chosen": f"\n\nHuman: q{n}\n\nAssistant: a", "rejected": f"\n\nHuman: q{n}\n\nAssistant: b"},
    lambda n: {"instruction": f"问题 {n}", "input": "", "output": "答"},
    lambda n: {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]},
    lambda n: {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": "a"}], "system": None},
    lambda n: {"prompt": f"q{n}", "outputs": ["a", "b", "c"]},
]  # fmt: skip


# --- damage to rows ---


def odd_value(rng: random.Random) -> Any:
    """A value of a type that nobody expects in that place."""
    return rng.choice(
        [None, True, 3, -1.5e308, float("nan"), 10**400, "", " ", "\ud83d", "\x00", [], {}, [[]], [None], [{"role": 3}],
         [{"role": ["user"], "content": {}}], {"role": "user"}, [{"role": "tool", "content": "x"}],
         [{"from": "gpt", "value": None}], "x" * 20_000]
    )  # fmt: skip


def wrong_types(rows: Rows, rng: random.Random) -> Rows:
    for row in rng.sample(rows, rng.randint(1, len(rows))):
        row[rng.choice(list(row))] = odd_value(rng)
    return rows


def wrong_fields(rows: Rows, rng: random.Random) -> Rows:
    for row in rng.sample(rows, rng.randint(1, len(rows))):
        row.pop(rng.choice(list(row)))
        row[rng.choice(["prompt", "label", "text", "tools", "\ud83d", "x" * 500, ""])] = odd_value(rng)
    return rows


def no_objects(rows: Rows, rng: random.Random) -> Rows:
    return [odd_value(rng) if rng.random() < 0.5 else row for row in rows]


def other_shapes(rows: Rows, rng: random.Random) -> Rows:
    return [rng.choice(MAKERS)(number) if rng.random() < 0.3 else row for number, row in enumerate(rows)]


def deep_nesting(rows: Rows, rng: random.Random) -> Rows:
    value: Any = "x"
    for _ in range(rng.choice([50, 300])):  # what json.dumps itself can write; deeper comes as bytes
        value = rng.choice([[value], {"content": value}])
    row = rng.choice(rows)
    row[rng.choice(list(row))] = value
    return rows


def untouched(rows: Rows, rng: random.Random) -> Rows:
    return rows


# --- damage to bytes ---


def truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 30]) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spliced(content: bytes, rng: random.Random) -> bytes:
    """A piece is lost, or comes twice, or noise comes between."""
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    piece = rng.choice([b"", content[start:end] * 2, rng.randbytes(20), b"\x00" * 20, b"\n\n", b"\r", b"[" * 50_000, b'{"a":' * 50_000])  # fmt: skip
    return content[:start] + piece + content[end:]


def mixed_encodings(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    text = lines[place].decode("utf-8", "replace")
    lines[place] = text.encode(rng.choice(["latin-1", "utf-16", "utf-16-le", "cp437", "utf-8-sig"]), "replace")
    return b"\n".join(lines)


def marked(content: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf\xef\xbb\xbf"]) + content


def windows_lines(content: bytes, rng: random.Random) -> bytes:
    return content.replace(b"\n", b"\r\n")


def huge_line(content: bytes, rng: random.Random) -> bytes:
    return content + rng.choice([b"x", b"[", b'"', b"1", b" "]) * 2_000_000 + rng.choice([b"\n", b""])


def whole(content: bytes, rng: random.Random) -> bytes:
    return content


TO_ROWS = (wrong_types, wrong_fields, no_objects, other_shapes, deep_nesting, untouched)
TO_BYTES = (truncated, flipped, flipped, spliced, mixed_encodings, marked, windows_lines, huge_line, whole)


def serialise(suffix: str, rows: Rows) -> bytes:
    """The rows in a format. Where a format cannot hold them at all, only those rows that it can."""
    if suffix in ("jsonl", "jsonl.gz"):
        content = "".join(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for number, row in enumerate(rows))
        encoded = content.encode("utf-8", "surrogatepass")
        return gzip.compress(encoded, mtime=0) if suffix == "jsonl.gz" else encoded
    if suffix == "json":
        return json.dumps(rows, indent=1).encode()
    objects = [row for row in rows if isinstance(row, dict)]
    if suffix == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, sorted({key for row in objects for key in row}), lineterminator="\n")
        writer.writeheader()
        writer.writerows(objects)
        return text.getvalue().encode("utf-8", "surrogatepass")
    file = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(objects), file)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        file = io.BytesIO()
        pq.write_table(pa.table({"prompt": ["q"], "chosen": ["a"], "rejected": ["b"]}), file)
    return file.getvalue()


def damaged_file(number: int, folder: Path) -> tuple[Path, int | None]:
    """File `number`, and how many rows it has where that can be known without reading them: the lines that are not blank."""
    rng = random.Random(number)
    maker = rng.choice(MAKERS)
    rows: Rows = [maker(row) for row in range(rng.choice([1, 5, 120]))]
    rows = rng.choice(TO_ROWS)(rows, rng)
    suffix = rng.choice(["jsonl", "jsonl", "json", "jsonl.gz", "csv", "parquet"])
    content = serialise(suffix, rows)
    for _ in range(rng.choice([1, 1, 2])):
        content = rng.choice(TO_BYTES)(content, rng)
    file = folder / f"{number}.{suffix}"
    file.write_bytes(content)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return file, sum(bool(line.strip()) for line in lines) if suffix == "jsonl" else None


def test_damaged_files_give_a_clean_result_or_a_clean_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(FILES):
        file, rows = damaged_file(number, tmp_path)
        pool, kept = Pool(io.BytesIO()), [0]
        rejects = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")

        def keep(records: tuple, pool: Pool = pool, kept: list[int] = kept) -> None:
            kept[0] += 1
            pool.add(records)

        started = time.monotonic()
        try:
            tally = take_in("DATA", str(file), None, Rules(expand_rankings=number % 2 == 0), keep, rejects)
            rejects.flush()
            listed = rejects.buffer.getvalue().count(b"\n")
            assert tally.rows == kept[0] + listed == tally.shapes.total() + tally.rejects.total(), file
            assert rows is None or tally.rows == rows, file
            check_share(tally, "DATA", str(file), max_bad_share=1.0)
            outcomes["some rows rejected" if listed else "read whole"] += 1
        except DataError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000, file
            str(error).encode()
            outcomes["refused"] += 1
        assert time.monotonic() - started < SECONDS_EACH, file
        file.unlink()
    capsys.readouterr().out.encode()
    assert sum(outcomes.values()) == FILES
    assert min(outcomes[kind] for kind in ("read whole", "some rows rejected", "refused")) > FILES // 20, outcomes
