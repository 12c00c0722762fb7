"""Where findings are shown: the log, MLflow, and `make health`; and what becomes of an error that memory ran out."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from pipeline.errors import DataError, TrainingError
from pipeline.health.__main__ import main
from pipeline.health.report import HealthLog
from pipeline.out_of_memory import out_of_memory
from pipeline.tracking.spool import Spool
from pipeline.tracking.tracker import Tracker

PARAMS = {"sft.lr": "0.001", "runtime.base_cache": "auto"}
BROKEN = {"loss": float("nan"), "non_finite_steps": 1.0}
NO_GAIN = {"development_loss_before": 3.5, "development_loss": 3.6}


def row(step: int, **figures: float) -> dict[str, float]:
    return {"step": step, "loss": 3.0, "non_finite_steps": 0.0, **figures}


def test_a_finding_is_one_block_of_the_log_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without tracking it is said all the same; the log has plain lines, none too long to read."""
    health = HealthLog("sft", Tracker(), PARAMS)
    with health.watching():
        for step in range(6):
            health.step(row(step, **(BROKEN if step >= 3 else {})))
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["sft, step 3: not-finite", "  seen    not finite: loss"]
    assert said[2].startswith("  cause   A learning rate")
    assert said[3] == "  change  Divide sft.lr (now 0.001) by 3; if it stays, set base.dtype to float32."
    assert len(said) == 4 and max(map(len, said)) <= 110


def test_each_finding_is_sent_at_once_and_all_at_the_end(tmp_path: Path) -> None:
    """What becomes of tags and files in MLflow is asked in test_tracking.py."""
    tracker = Tracker(Spool(tmp_path, "run"))
    health = HealthLog("sft", tracker, PARAMS)
    with health.watching():
        health.step(row(0))
        health.step(row(1, **BROKEN))
        (found,) = (entry["tags"] for entry, _ in tracker.spool.read())
        assert found == {"health.not-finite": "step 1: not finite: loss"}
        health.result(NO_GAIN)
    entries = [entry for entry, _ in tracker.spool.read()]
    tags = {name: value for entry in entries if entry["do"] == "tags" for name, value in entry["tags"].items()}
    assert tags["health"] == "not-finite, no-gain"
    assert tags["health.no-gain"] == "step 2: development loss 3.5 before, 3.6 after"
    (file,) = (entry["file"] for entry in entries if entry["do"] == "file")
    assert file == "health.json"
    table = json.loads((tracker.spool.files / file).read_text())
    assert table["columns"] == ["rule", "step", "seen", "cause", "change"]
    assert [found[:2] for found in table["data"]] == [["not-finite", 1], ["no-gain", 2]]


class Tags(Tracker):
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, str] = {}

    def set_tags(self, tags: dict[str, str]) -> None:
        self.tags |= tags


def test_a_run_without_findings_says_so_and_a_stage_without_steps_nothing() -> None:
    clean, empty = Tags(), Tags()
    for tracker, steps in ((clean, 1), (empty, 0)):
        health = HealthLog("sft", tracker, {})
        with health.watching():
            for step in range(steps):
                health.step(row(step))
    assert clean.tags == {"health": "nothing found"}
    assert empty.tags == {}


def test_a_stage_that_is_stopped_keeps_its_findings() -> None:
    tracker = Tags()
    health = HealthLog("sft", tracker, {})
    with pytest.raises(KeyboardInterrupt), health.watching():
        health.step(row(0, **BROKEN))
        raise KeyboardInterrupt
    assert tracker.tags["health"] == "not-finite"


def too_large() -> None:
    torch.empty(2**50)  # 4 PiB


def test_out_of_memory_says_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor that no machine holds, on the CPU, where torch raises a plain RuntimeError."""
    tracker = Tags()
    health = HealthLog("ppo", tracker, PARAMS)
    with pytest.raises(TrainingError, match="out of memory; what to lower is said above"), health.watching():
        health.step(row(0))
        too_large()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("ppo, step 1: out-of-memory seen ")
    assert "allocate" in said
    assert "Set runtime.base_cache (now auto) to off, runtime.gradient_checkpointing to true" in said
    assert tracker.tags["health"] == "out-of-memory"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\nmore"),
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
        ),
        (MemoryError("Unable to allocate 8.00 TiB for an array"), "Unable to allocate 8.00 TiB for an array"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (RuntimeError(), None),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, seen: str | None) -> None:
    assert out_of_memory(error) == seen


@pytest.mark.parametrize("error", [RuntimeError("shapes"), DataError("a row"), KeyError("name")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, HealthLog("sft", Tracker(), {}).watching():
        raise error
    assert raised.value is error


@pytest.fixture
def last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed run, in which one is."""
    for folder in ("plots", "metrics"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "recipes/demo.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_make_health_finds_nothing_in_the_committed_run(last_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    said = capsys.readouterr().out
    looked = ", ".join(rf"{stage} \(\d+ steps\)" for stage in ("sft", "reward", "judge", "ppo", "dpo"))
    assert re.search(f"Looked at {looked}", said)
    assert "Nothing found in sft, reward, judge, ppo, dpo." in said


def test_make_health_shows_findings_as_a_table(last_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (last_run / "plots/ppo.tsv").write_text("step\tend_token_rate\tkl_per_sequence_k1\n0\t0.2\t0\n1\t0.3\t-7\n")
    (last_run / "metrics/sft.json").write_text(json.dumps(NO_GAIN))
    main()
    said = capsys.readouterr().out
    assert all(rule in said for rule in ("no-gain", "answers-cut", "kl-negative"))
    assert "Nothing found in reward, judge, dpo." in said


def test_make_health_without_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "recipes/demo.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "There is no curve in plots/ yet" in capsys.readouterr().out
