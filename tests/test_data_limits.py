"""Places that cannot be followed, words that cannot be printed, and rows that are too large."""

import json
import os
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from taking import chat, take, user, write_rows

from pipeline.data.intake import take_in
from pipeline.data.pool import Pool
from pipeline.data.recognition import Rules
from pipeline.data.records import group_key
from pipeline.errors import DataError

# --- files, folders and words that cannot be followed ---


def test_a_folder_is_read_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_rows(tmp_path / "data" / "a.jsonl", {"prompt": "q", "completion": "a"})
    (tmp_path / "data" / "train").symlink_to(tmp_path / "elsewhere")
    assert len(take(tmp_path / "data")[0]) == 1
    assert "not data, so not read: train/(a link to a folder)" in capsys.readouterr().out
    (tmp_path / "data" / "b.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl in .* is no file, or a link to nothing"):
        take(tmp_path / "data")
    (tmp_path / "data" / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "data" / "c.jsonl")
    with pytest.raises(DataError, match=r"c\.jsonl in .* is no file"):
        take(tmp_path / "data")


def test_a_link_out_of_the_named_folder_is_not_followed(tmp_path: Path) -> None:
    """Data that somebody else made must not bring in what lies elsewhere; a link within, and a link that is named, may be."""
    write_rows(tmp_path / "private.jsonl", {"prompt": "q", "completion": "a"})
    (tmp_path / "data" / "raw").mkdir(parents=True)
    write_rows(tmp_path / "data" / "raw" / "a.jsonl", {"prompt": "r", "completion": "b"})
    (tmp_path / "data" / "b.jsonl").symlink_to("raw/a.jsonl")
    assert len(take(tmp_path / "data")[0]) == 2
    (tmp_path / "data" / "c.jsonl").symlink_to("../private.jsonl")
    with pytest.raises(DataError, match=r"c\.jsonl in .* is a link that leads out of that folder"):
        take(tmp_path / "data")
    assert len(take(tmp_path / "data" / "c.jsonl")[0]) == 1


@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
def test_what_cannot_be_opened_is_a_clean_error(
    fault: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_file(place: Path) -> bool:
        raise fault

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(DataError, match=f"which cannot be opened: {fault.strerror}"):
        take(tmp_path / "rows.jsonl")


def test_a_folder_in_a_folder_that_may_not_be_opened_is_a_clean_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "a.jsonl", {"prompt": "q", "completion": "a"})
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def scan(place: str) -> Any:
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(DataError, match="which cannot be opened: Permission denied"):
        take(tmp_path)


def test_a_user_that_does_not_exist_and_a_name_too_long_are_clean_errors() -> None:
    for path in ("~nosuchuser/rows.jsonl", "x" * 5000):
        with pytest.raises(DataError, match="which cannot be opened"):
            take(path)


def test_a_file_whose_name_is_no_text_can_have_rejects(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    file.write_text('{"prompt": "q", "completion": "a"}\nbroken\n')
    with (tmp_path / "rejects").open("w", encoding="utf-8") as rejects:
        take_in("data.test", str(file), None, Rules(), lambda records: None, rejects)
    assert json.loads((tmp_path / "rejects").read_text())["file"] == "caf?.jsonl"


@pytest.mark.parametrize("words", [[], ["rows.jsonl", "a", "b"], ["rows.jsonl", "a b"]])
def test_check_data_needs_its_words(words: list[str]) -> None:
    ran = check_data(*words)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_check_data_prints_where_only_ascii_can_be_printed(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"chosen": "ä", "rejected": "b"})
    ran = check_data(str(tmp_path / "rows.jsonl"), LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "Human: ?" in ran.stdout


def check_data(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.check_data", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


# --- work that grows faster than the data ---

LARGE: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": chat(*["x"] * 6000)}, "auto", "messages has more than 1000 turns; divide it into shorter conversations"),
    (
        {"prompt": "q", "outputs": [f"a{number}" for number in range(1500)]},
        "prompt-ranked",
        "outputs has more than 100 answers, each of which would be paired with all others",
    ),
    ({"messages": chat(*["x"] * 1000)}, "auto", None),
    ({"prompt": "a" + "\u0300\u0316" * 200_000, "completion": "a"}, "auto", None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "shape", "reason"), LARGE, ids=["turns", "ranks", "most turns", "marks"])
def test_large_rows_take_little_time(row: dict, shape: str, reason: str | None, tmp_path: Path) -> None:
    pool = Pool(BytesIO())
    started = time.process_time()
    file = str(write_rows(tmp_path / "rows.jsonl", row))
    tally = take_in("data.test", file, None, Rules(shape, shape.endswith("ranked")), pool.add)
    assert tally.rejects == ({reason: 1} if reason else {})
    assert time.process_time() - started < 5


def test_order_of_marks_still_does_not_matter_for_groups() -> None:
    assert group_key((user("e\u0301\u0323"),)) == group_key((user("e\u0323\u0301"),))
