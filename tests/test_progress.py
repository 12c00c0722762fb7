"""What is seen of a stage while it runs, in each mode of `runtime.progress`."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, runtime

from pipeline import progress
from pipeline.banner import tell_end, tell_start, tell_work
from pipeline.params.base import TokensParams
from pipeline.progress import Mode, ProgressBar, announce, console, duration, show_as, shown_as, tell
from pipeline.stage import Stage, run_stage

TOKENS = TokensParams(system=None, system_role="merge", max_prompt=96, max_response=24)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CI", raising=False)
    yield
    show_as("auto")


def loop(total: int = 4, line_every: int = 2, first: int = 0) -> None:
    with ProgressBar("sft", total, line_every) as bar:
        for step in range(first, total):
            bar.advance(step, loss=0.5, score=float("nan"))


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("lines", ["sft 2/4  loss 0.5  score nan  0 s left", "sft 4/4  loss 0.5  score nan"]),
        ("quiet", []),
        ("auto", ["sft 2/4  loss 0.5  score nan  0 s left", "sft 4/4  loss 0.5  score nan"]),
    ],
)
def test_lines_come_every_so_many_steps(mode: Mode, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    show_as(mode)
    loop()
    assert capsys.readouterr().out.splitlines() == lines


def test_what_a_step_is_at_stands_beside_the_bar_until_it_is_done() -> None:
    with ProgressBar("ppo", 2, 1) as bar:
        progress.doing("sampling")
        (task,) = bar._bar.tasks
        assert task.fields["doing"] == "sampling"
        bar.advance(0)
        assert task.fields["doing"] == ""
    progress.doing("nothing that a bar could show")


def test_a_slow_step_brings_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0)
    show_as("lines")
    loop(line_every=1000)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_auto_is_quiet_in_ci_and_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    show_as("auto")
    assert shown_as() == "lines"
    monkeypatch.setattr(console, "_force_terminal", True)
    assert shown_as() == "bars"
    monkeypatch.setenv("CI", "true")
    assert shown_as() == "quiet"
    show_as("bars")
    assert shown_as() == "bars", "what is asked for goes before CI"


def test_a_bar_has_numbers_time_left_and_leaves_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "_width", 120)
    show_as("bars")
    loop()
    out = capsys.readouterr().out
    assert "sft 2/4  loss 0.5" in out, "the line"
    assert "━" in out and "4/4" in out and "<" in out, "the bar"


def test_json_is_one_object_per_line_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    show_as("json")
    loop(total=2)
    tell(["mind [the] gap"])
    announce("work", "for people", rows=7)
    first, second, note, work = map(json.loads, capsys.readouterr().out.splitlines())
    assert first | {"seconds_left": 0} == {
        **{"event": "step", "loop": "sft", "step": 1, "of": 2, "seconds_left": 0, "loss": 0.5, "score": None},
    }
    assert second["step"] == 2 and second["seconds_left"] == 0
    assert note == {"event": "text", "text": "note: mind [the] gap"}
    assert work == {"event": "work", "rows": 7}


def test_time_left_is_at_the_pace_of_this_process() -> None:
    """A loop that goes on at step 90 of 100 and takes 2 seconds a step needs 16 seconds after two: the 90 were free."""
    show_as("quiet")
    bar = ProgressBar("sft", 100, 5)
    bar.advance(90)
    assert bar.seconds_left(92, elapsed=4.0) == 16.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (579, "9 min 39 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_first_and_last_lines_say_what_is_done_with_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@tracking:5000")
    show_as("quiet")
    tell_start("ppo", 17, runtime(), ".work/ppo")
    tell_work("ppo", {"policy": 4884480, "value": 577}, ["policy", "sft"], "9 iterations", TOKENS)
    tell_end("ppo", {"cost.seconds": 579.0, "cost.peak_memory_gb": 3.55, "cost.peak_gpu_memory_gb": 1.25})
    assert capsys.readouterr().out.splitlines() == [
        "ppo: seed 17; figures go to MLflow at http://***@tracking:5000, experiment tests; training state to .work/ppo",
        "ppo: adapters on the base: policy, sft",
        "ppo: weights that are trained: 4,884,480 (policy), 577 (value)",
        "ppo: 9 iterations; prompts of up to 96 tokens, answers of up to 24",
        "ppo: done in 9 min 39 s, peak memory 3.5 GB, 1.2 GB on the GPU; metrics/ppo.json has the result",
    ]


def test_a_stage_in_json_prints_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dvc.yaml", "alternatives/dvc.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    recipe = (ROOT / "recipes/smoke.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(recipe.replace("  progress: auto", "  progress: json"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nothing/mlflow.db")

    def body(stage: Stage) -> None:
        with stage.progress(1) as bar:
            time.sleep(0.01)
            bar.advance(0, loss=1.0)
        for path in ("artifacts/sft", "metrics/sft.json", "plots/sft.tsv"):
            Path(path).mkdir(parents=True)

    run_stage("sft", body)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # tracking has a thread, and says that MLflow is away whenever it finds out
    events = [line for line in lines if line["event"] != "text"]
    assert [event["event"] for event in events] == ["start", "step", "end"]
    assert events[0]["seed"] == 17
    assert events[-1]["seconds"] > 0
