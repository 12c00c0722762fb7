"""MLflow: parents, children, lineage, true ends, and failures that do not hurt."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline.tracking import Tracker, find_output, start_run


def begin(folder: Path, stage: str, key: str = "k1", **tags: str) -> Tracker:
    return start_run(
        uri=f"sqlite:///{folder}/mlflow.db",
        experiment="tests",
        lock_file=folder / "lock",
        stage=stage,
        pipeline_key=key,
        run_name="seed 1",
        params={f"{stage}.lr": "1e-5"},
        parent_params={"seed": "1"},
        tags=tags,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making one takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


def test_stages_of_one_pipeline_share_a_parent(folder: Path) -> None:
    first, second, other = begin(folder, "sft"), begin(folder, "reward"), begin(folder, "sft", key="k2")
    assert first.parent_id == second.parent_id != other.parent_id
    assert len({first.run_id, second.run_id, other.run_id}) == 3
    first.end("FINISHED")
    second.end("FAILED")
    assert first.client.get_run(first.run_id).info.status == "FINISHED"
    assert first.client.get_run(second.run_id).info.status == "FAILED"
    assert first.client.get_run(first.parent_id).info.status == "FAILED"
    third = begin(folder, "reward")
    assert third.client.get_run(third.parent_id).info.status == "RUNNING"
    third.end("FINISHED")
    other.end("KILLED")
    assert third.client.get_run(other.run_id).info.status == "KILLED"


def test_metrics_arrive_per_step_and_non_finite_ones_are_left_out(folder: Path) -> None:
    tracker = begin(folder, "ppo")
    for step in range(3):
        tracker.log_metrics(step, {"score": step / 2, "broken": float("nan"), "endless": float("inf")})
    tracker.summarize("ppo", {"win_rate": 0.75})
    tracker.end("FINISHED")
    history = tracker.client.get_metric_history(tracker.run_id, "score")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    run = tracker.client.get_run(tracker.run_id)
    assert set(run.data.metrics) == {"score", "final.win_rate"}
    assert tracker.client.get_run(tracker.parent_id).data.metrics["ppo.win_rate"] == 0.75
    assert run.data.params == {"ppo.lr": "1e-5"}


def test_a_name_that_mlflow_refuses_costs_no_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reasons of rejected rows become names of metrics, and they may hold quotes and dots."""
    tracker = begin(folder, "prepare", key="k6")
    tracker.summarize("prepare", {"rejected.prompt has a turn with role 'tool'": 2.0, "rows": 3.0})
    tracker.end("FINISHED")
    assert "MLflow" not in capsys.readouterr().out
    found = tracker.client.get_run(tracker.parent_id).data.metrics
    assert found == {"prepare.rejected.prompt has a turn with role _tool_": 2.0, "prepare.rows": 3.0}


def test_a_run_is_found_by_what_it_made(folder: Path) -> None:
    maker = begin(folder, "sft", key="k3")
    maker.set_tags({"output:artifacts/sft": "abc"})
    maker.end("FINISHED")
    user = begin(folder, "ppo", key="k4")
    assert find_output(user, "artifacts/sft", "abc").info.run_id == maker.run_id
    assert find_output(user, "artifacts/sft", "abd") is None
    user.end("FINISHED")


def test_tables_and_files_arrive(folder: Path, tmp_path: Path) -> None:
    tracker = begin(folder, "evaluate")
    tracker.log_table("samples", [{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}])
    (tmp_path / "note.txt").write_text("hello")
    tracker.log_file(tmp_path / "note.txt")
    tracker.end("FINISHED")
    names = {item.path for item in tracker.client.list_artifacts(tracker.run_id)}
    assert {"samples.json", "note.txt"} <= names


def test_a_tracking_store_that_fails_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The database cannot be made: the stage goes on, and says so once and at the end."""
    (tmp_path / "file").write_text("in the way")
    tracker = start_run(f"sqlite:///{tmp_path}/file/mlflow.db", "x", tmp_path / "lock", "sft", "k", "n", {}, {}, {})
    tracker.log_metrics(0, {"loss": 1.0})
    tracker.set_tags({"a": "b"})
    tracker.end("FINISHED")
    said = capsys.readouterr().out
    assert said.count("the stage goes on without it") == 1
    assert "MLflow missed 1 calls" in said


def test_a_store_that_fails_in_the_middle_stops_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = begin(folder, "sft", key="k5")
    run_id = tracker.run_id
    tracker.run_id = "no such run"
    tracker.log_metrics(0, {"loss": 1.0})
    tracker.set_tags({"a": "b"})
    tracker.run_id = run_id
    tracker.end("FINISHED")
    assert capsys.readouterr().out.count("the stage goes on without it") == 1
    assert isinstance(tracker.client, MlflowClient)
    assert tracker.client.get_run(run_id).info.status == "FINISHED"
