"""Files, folders and hub data sets -> rows."""

import csv
import gzip
import json
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from datasets import load_dataset
from taking import demonstration, pair, take, write_rows

from pipeline.data.hub import hub_rows
from pipeline.data.intake import MOST_LOOKED_AT, SHOWN_REJECTS, check_share, take_in_all
from pipeline.data.json_arrays import CHUNK, array_items
from pipeline.data.records import Pair
from pipeline.data.rows import MAX_ROW, Row
from pipeline.data.sources import HubData, find_data
from pipeline.errors import DataError, ParameterError
from pipeline.params.data import DataParams
from pipeline.params.section import parse_section, read_params

ROWS = [{"prompt": f"q{number}", "chosen": "ä", "rejected": "b\n"} for number in range(3)]
PAIRS = [pair(f"q{number}", "ä", "b\n") for number in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
REVISION = "0" * 40


def as_csv(rows: list[dict[str, str]], end: str = "\n") -> bytes:
    text = StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(file: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CR LF"])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "csv"])
def test_all_formats_give_the_same_records(suffix: str, end: bytes, mark: bytes, tmp_path: Path) -> None:
    content = {
        "jsonl": LINES.replace(b"\n", end),
        "jsonl.gz": gzip.compress(mark + LINES.replace(b"\n", end)),
        "json": json.dumps(ROWS, indent=1).encode().replace(b"\n", end),
        "csv": as_csv(ROWS, end.decode()),
    }[suffix]
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(content if suffix == "jsonl.gz" else mark + content)
    assert take(file)[0] == PAIRS


def test_parquet_with_nested_messages(tmp_path: Path) -> None:
    """Columns that only some rows have are null in the others, and null is as good as not there."""
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss_weight": 1.0}]},
        {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}], "system": ""},
    ]
    as_parquet(tmp_path / "rows.parquet", rows)
    records, tally = take(tmp_path / "rows.parquet")
    assert (records, tally.rejects) == ([demonstration("q", "a"), demonstration("r", "b")], {})


def test_a_folder_of_many_formats_each_file_with_its_own_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    as_parquet(tmp_path / "b" / "1.parquet", ROWS[:1])
    (tmp_path / "a.csv").write_bytes(as_csv(ROWS[1:2]))
    (tmp_path / "c.json").write_text(json.dumps([{"instruction": "q", "input": "", "output": "a"}]))
    (tmp_path / "README.md").write_text("about")
    write_rows(tmp_path / ".cache" / "hidden.jsonl", ROWS[2])
    records, tally = take(tmp_path)
    assert records == [PAIRS[1], PAIRS[0], demonstration("q", "a")]
    assert f"{tmp_path}: not data, so not read: README.md\n" in capsys.readouterr().out
    assert tally.shapes == {"prompt with chosen and rejected": 2, "Alpaca instructions": 1}


def test_one_object_per_line_may_be_called_json(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(LINES)
    assert take(tmp_path / "rows.json")[0] == PAIRS


def test_rejects_are_named_by_file_and_line(tmp_path: Path) -> None:
    """Report hiyouga/LLaMA-Factory#3555: line, field and type, before any token is made."""
    lines = [
        b'{"prompt":"q1","chosen":"a","rejected":"b"}',
        b"",
        b'{"prompt":"q2","chosen":null,"rejected":"b"}',
        b"{oops",
        b'{"prompt":"q3"}',
        b'{"prompt":"q4","chosen":"\xff","rejected":"b"}',
        b"[" * 100_000,
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    with (tmp_path / "rejects.txt").open("w") as rejects:
        cfg = data_params(pairs=str(tmp_path), max_bad_share=0.9)
        records: list[Pair] = []
        tallies = take_in_all(cfg, records.extend, rejects)
    assert records == [pair("q1", "a", "b")]
    assert (tallies["pairs"].rows, tallies["pairs"].figures()["rows_used"]) == (6, 1)
    found = [json.loads(line) for line in (tmp_path / "rejects.txt").read_text().splitlines()]
    assert found == [
        {"file": "rows.jsonl", "line": line, "field": field, "type": kind, "reason": reason}
        for line, field, kind, reason in [
            (3, "chosen", "null", "is null, not text or messages"),
            (4, "row", "text", "is not valid JSON"),
            (5, "chosen", "missing", "is missing"),
            (6, "row", "text", "is not UTF-8"),
            (7, "row", "text", "is nested too deep"),
        ]
    ]


def data_params(**changes) -> DataParams:
    """The demo's data section, with changes."""
    return parse_section("data", DataParams, {**read_params(ROOT / "recipes" / "demo.yaml")["data"], **changes})


def test_the_share_of_bad_rows_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [{"prompt": "q", "chosen": "a"}] * 22 + [{"prompt": "q", "chosen": " ", "rejected": "b"}]
    _, tally = take(write_rows(tmp_path / "rows.jsonl", *ROWS, *bad))
    assert len(tally.shown) == SHOWN_REJECTS
    with pytest.raises(
        DataError,
        match=r"23 of 26 rows of rows cannot be used \(88\.5%; most often: rejected is missing, 22 times\), "
        r"more than data\.max_bad_share 0\.5",
    ):
        check_share(tally, "data.pairs", "rows", max_bad_share=0.5)
    check_share(tally, "data.pairs", "rows", max_bad_share=0.9)
    assert "… and 3 more rows that cannot be used" in capsys.readouterr().out


def test_a_named_shape_concerns_the_source_of_its_kind(tmp_path: Path) -> None:
    both = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "c"}
    file = str(write_rows(tmp_path / "rows.jsonl", both))
    chats = str(write_rows(tmp_path / "chats.jsonl", {"instruction": "q", "output": "a"}))
    records: list[Pair] = []
    with (tmp_path / "rejects.txt").open("w") as rejects:
        cfg = data_params(pairs=file, demonstrations=chats, shape="prompt-pairs")
        assert set(take_in_all(cfg, records.extend, rejects)) == {"pairs", "demonstrations"}
        assert records == [pair("q", "a", "b"), demonstration("q", "a")]
        with pytest.raises(
            DataError, match=r"data\.shape is alpaca, a shape of demonstrations, but data\.demonstrations names no"
        ):
            take_in_all(data_params(pairs=file, shape="alpaca"), records.extend, rejects)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.test is .* there is no such file or folder"):
        take(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="that folder has no file ending in"):
        take(tmp_path)
    (tmp_path / "table.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="only files ending in"):
        take(tmp_path / "table.xlsx")
    (tmp_path / "empty.jsonl").touch()
    _, tally = take(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="has no row at all"):
        check_share(tally, "data.pairs", "empty.jsonl", max_bad_share=1.0)


UNREADABLE = {
    "cut.jsonl.gz": (gzip.compress(LINES * 1000)[:300], "cannot be read to its end"),
    "none.jsonl.gz": (b"no gzip", "cannot be read to its end"),
    "cut.json": (json.dumps(ROWS)[:-30].encode(), "item 3 is broken"),
    "end.json": (json.dumps(ROWS).encode() + b"{}", "something follows the array's end"),
    "object.json": (
        json.dumps({"data": ROWS}, indent=1).encode(),
        "neither a list of rows nor has it one row per line",
    ),
    "comma.json": (b'[{"a": 1} {"a": 2}]', "there is no comma before item 2"),
    "none.parquet": (b"PAR1 no PAR1", "cannot be read to its end"),
    "quote.csv": (b'prompt,chosen,rejected\nq,"a,b\n', "cannot be read to its end"),
    "twice.csv": (b"prompt,prompt\nq,q\n", "names a field twice"),
    "wide.jsonl": (LINES.decode().encode("utf-16"), "is UTF-16 or UTF-32 but must be UTF-8"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_to_its_end_is_one_clean_error(name: str, tmp_path: Path) -> None:
    content, words = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(name)} .*{words}"):
        take(tmp_path / name)


def test_csv_lines_are_counted_over_line_breaks_in_cells(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'prompt,chosen,rejected\nq,"a\na",b\nr,a\ns,\xff,b\n\nt,a,b\n')
    records, tally = take(tmp_path / "rows.csv")
    assert records == [pair("q", "a\na", "b"), pair("t", "a", "b")]
    assert [(bad.line, bad.kind) for bad in tally.shown] == [
        (4, "row has another number of cells than the first line"),
        (5, "chosen holds bytes that are not UTF-8, or one half of an escaped pair of surrogates"),
    ]


def test_rows_after_many_broken_ones_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"# no JSON\n" * 500 + LINES)
    records, tally = take(tmp_path / "rows.jsonl")
    assert (records, tally.rejects) == (PAIRS, {"row is not valid JSON": 500})
    (tmp_path / "rows.jsonl").write_bytes(b"[]\n" * MOST_LOOKED_AT + LINES)
    records, tally = take(tmp_path / "rows.jsonl")
    assert not records
    assert tally.rejects == {
        "row is a list, not an object": MOST_LOOKED_AT,
        f"row comes after {MOST_LOOKED_AT} rows of which none is an object": 3,
    }


def test_a_line_too_long_is_a_reject_and_the_next_is_read(tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"prompt": "')
        for _ in range(MAX_ROW // 2**20 + 1):
            file.write(b"x" * 2**20)
        file.write(b'", "chosen": "a", "rejected": "b"}\n' + LINES)
    records, tally = take(tmp_path / "rows.jsonl")
    assert (records, tally.rejects) == (PAIRS, {f"row is longer than {MAX_ROW} bytes": 1})


@pytest.mark.parametrize("length", range(CHUNK - 12, CHUNK + 3))
def test_array_items_that_lie_across_a_chunk_are_whole(length: int) -> None:
    """A number is the hard case: 12 is whole, and it is also the beginning of 1234."""
    text = "[" + json.dumps("x" * (length - 10)) + ", 1234, [1, 2] ]\n"
    assert list(array_items(StringIO(text))) == ["x" * (length - 10), 1234, [1, 2]]


def test_array_items_longer_than_a_chunk_are_whole() -> None:
    items = ["x" * (3 * CHUNK), {"a": []}, "y" * CHUNK]
    assert list(array_items(StringIO(json.dumps(items)))) == items
    assert list(array_items(StringIO(" [ ]"))) == []


# --- the hub ---


def test_hub_names_are_pinned() -> None:
    assert find_data("DATA", f"hf://org/name@{REVISION}:train[:10]") == [HubData("org/name", REVISION, "train[:10]")]
    for name in (
        "hf://org/name",
        "hf://org/name:train",
        "hf://org/name@main",
        "hf://name@main:train",
        "hf://../..@main:train",
    ):
        with pytest.raises(DataError, match=r"must be written hf://org/name@revision:split, with the revision pinned"):
            find_data("DATA", name)


def test_a_pointer_file_names_hub_data(tmp_path: Path) -> None:
    """DVC follows files, and refuses hf:// addresses as dependencies."""
    (tmp_path / "mine.hf").write_text(f"hf://org/name@{REVISION}:train\n")
    assert find_data("data.pairs", str(tmp_path / "mine.hf")) == [HubData("org/name", REVISION, "train")]
    with pytest.raises(ParameterError, match=r"data\.pairs is 'hf://org/name@1:train' but DVC follows files"):
        data_params(pairs="hf://org/name@1:train")


def test_hub_rows_are_streamed_and_numbered() -> None:
    asked: dict[str, object] = {}

    def load(name: str, **settings: object) -> list[dict[str, str]]:
        asked.update(name=name, **settings)
        return ROWS

    assert list(hub_rows(HubData("org/name", REVISION, "train"), load)) == [Row(n + 1, ROWS[n]) for n in range(3)]
    assert asked == {"name": "hf://datasets/org/name", "revision": REVISION, "split": "train", "streaming": True}


def test_hub_faults_are_one_clean_error() -> None:
    def load(name: str, **settings: object) -> list[dict[str, str]]:
        raise ConnectionError("Couldn't reach\nthe hub")

    with pytest.raises(DataError, match=r"hf://org/name@1:train cannot be read: Couldn't reach the hub\. Check name"):
        list(hub_rows(HubData("org/name", "1", "train"), load))


def test_what_the_library_gives_are_rows_as_the_other_readers_give_them(tmp_path: Path) -> None:
    as_parquet(tmp_path / "train.parquet", ROWS)

    def load(name: str, **settings: Any) -> Iterable[dict[str, Any]]:
        return load_dataset(str(tmp_path), **settings)

    found = list(hub_rows(HubData("org/name", "1", "train"), load))
    assert [row.content for row in found] == ROWS


def test_a_hub_name_never_reads_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself load_dataset prefers a folder of that name to the hub."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    as_parquet(tmp_path / "org" / "name" / "train.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    assert len(list(load_dataset("org/name", split="train", streaming=True))) == 3
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hf://org/name@1:train cannot be read"):
        list(hub_rows(HubData("org/name", "1", "train")))
