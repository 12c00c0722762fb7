"""Files that are not what they seem: the error says what they are, and what to do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from taking import chat, pair, take, write_rows

from pipeline.data.intake import check_share
from pipeline.errors import DataError

ROW = {"prompt": "q", "completion": "a"}
LINE = json.dumps(ROW) + "\n"

FILES: dict[str, tuple[str, bytes, str]] = {
    "list": ("rows.jsonl", json.dumps([ROW]).encode(), "is one JSON list and not one row per line; let its name end in .json"),
    "list over lines": ("rows.jsonl", json.dumps([ROW], indent=1).encode(), "is one JSON list"),
    "object over lines": ("rows.jsonl", json.dumps(ROW, indent=1).encode(), "has rows over many lines"),
    "LFS pointer": ("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n", "git lfs pull"),
    "LFS pointer to parquet": ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n", "git lfs pull"),
    "compressed": ("rows.jsonl", gzip.compress(LINE.encode()), r"is compressed; let its name end in \.jsonl\.gz"),
    "UTF-16 without a mark": ("rows.jsonl", LINE.encode("utf-16-le"), "is UTF-16 or UTF-32"),
    "UTF-32": ("rows.jsonl", LINE.encode("utf-32"), "is UTF-16 or UTF-32"),
    "semicolons": ("rows.csv", b"prompt;completion\nq;a\n", "is separated by semicolons or tabs"),
    "tabs": ("rows.csv", b"prompt\tcompletion\nq\ta\n", "is separated by semicolons or tabs"),
    "rows in a field": ("rows.json", json.dumps({"data": [ROW]}).encode(), "is one object whose rows are in data; bring that list alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_cause_is_named(name: str, tmp_path: Path) -> None:
    file, content, words = FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{file} .*{words}"):
        take(tmp_path / file)


def test_arrow_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "data-00000-of-00001.arrow").touch()
    write_rows(tmp_path / "state.json", {})
    with pytest.raises(DataError, match=r"holds \.arrow files, as save_to_disk writes them"):
        take(tmp_path)


def test_no_row_and_no_weight_are_told_apart(tmp_path: Path) -> None:
    weightless = {"messages": [*chat("q"), {"role": "assistant", "content": "a", "weight": 0}]}
    for rows, words in (([], "has no row at all"), ([weightless], "the loss weight of all is 0")):
        _, tally = take(write_rows(tmp_path / "rows.jsonl", *rows))
        with pytest.raises(DataError, match=words):
            check_share(tally, "DATA", "rows.jsonl", 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {"message_tree_id": "x", "prompt": {"text": "q", "role": "prompter", "replies": [{"text": "a"}]}},
        {"message_id": "b", "parent_id": "a", "text": "yo", "role": "assistant"},
    ],
)
def test_trees_of_messages_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"trees of messages .* follow each branch"):
        take(write_rows(tmp_path / "rows.jsonl", row))


def test_texts_for_turns_are_rejected_with_what_is_wanted(tmp_path: Path) -> None:
    _, tally = take(write_rows(tmp_path / "rows.jsonl", {"conversations": ["q", "a"]}))
    assert tally.rejects == {"conversations has a turn that is text, not an object with role and content": 1}


def test_a_named_shape_settles_what_may_be_ranked(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b", "responses": ["b", "a"]})
    assert take(file, shape="prompt-pairs")[0] == [pair("q", "a", "b")]


def test_a_reading_that_reads_no_row_is_no_rival(tmp_path: Path) -> None:
    turns = [{"input": "q", "output": "a"}]
    row = {"conversation": turns, "prompt": "q", "chosen": chat("q", "a"), "rejected": chat("q", "b")}
    assert take(write_rows(tmp_path / "rows.jsonl", row))[0] == [pair("q", "a", "b")]
