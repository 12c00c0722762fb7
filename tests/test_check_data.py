"""`make check-data`: says what prepare would make of data, and leaves no trace."""

import sys
from pathlib import Path

import pytest
from taking import write_rows

from pipeline.check_data import main


def check(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["check_data", *words])
    main()


def test_a_sound_file_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"q{number // 2}", "chosen": "yes " * (1 + number % 2), "rejected": "no no"} for number in range(8)
    ]
    file = write_rows(tmp_path / "rows.jsonl", *rows, {"prompt": "q", "chosen": None, "rejected": "b"})
    monkeypatch.chdir(tmp_path)
    check(monkeypatch, str(file))
    assert capsys.readouterr().out.splitlines() == [
        "rows.jsonl: prompt with chosen and rejected, 9 rows; 1 of them rejected",
        "rows.jsonl:9: chosen is null, not text or messages",
        "9 rows hold 8 pairs, with 4 different prompts.",
        "1 rows (11.11%) cannot be used:",
        "        1  chosen is null, not text or messages",
        "The chosen answer is the longer one in 50% of the pairs.",
    ]
    assert list(tmp_path.iterdir()) == [file]


def test_length_that_tells_the_label_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"q{number}", "chosen": "long enough", "rejected": "no"} for number in range(20)]
    check(monkeypatch, str(write_rows(tmp_path / "rows.jsonl", *rows)))
    assert "WARNING: length alone tells chosen from rejected" in capsys.readouterr().out


def test_a_refusal_is_one_line_and_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "outputs": ["a", "b"]})
    with pytest.raises(SystemExit) as stop:
        check(monkeypatch, str(file))
    assert stop.value.code == 1
    assert capsys.readouterr().out.startswith("rows.jsonl holds ranked answers")
    with pytest.raises(SystemExit):
        check(monkeypatch, str(file), "ranks")
    assert "SHAPE is 'ranks' but must be one of prompt-pairs" in capsys.readouterr().out


def test_who_names_ranked_answers_has_them_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "outputs": ["a", "b", "c"]})
    check(monkeypatch, str(file), "prompt-ranked")
    assert "1 rows hold 3 pairs, with 1 different prompts." in capsys.readouterr().out
