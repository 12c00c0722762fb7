"""MLflow on SQLite: parents, children, lineage, true ends, what it refuses, and a database that somebody else has locked."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import sync_tracking
from pipeline.params.runtime import RuntimeParams
from pipeline.tracking.delivery import deliver
from pipeline.tracking.destination import Destination, destination
from pipeline.tracking.runs import Unavailable
from pipeline.tracking.spool import Delivered, Spool
from pipeline.tracking.store import RUN_KEY, Store
from pipeline.tracking.tracker import Tracker, start_run
from pipeline.tracking.view import COMPARISON

HASH_7000 = "bad0f0b22623cfba"  # printf 'x%.0s' {1..7000} | sha256sum | cut -c-16
WRITER = """
import sys
from pathlib import Path
from pipeline.tracking.destination import Destination
from pipeline.tracking.tracker import start_run
folder = Path(sys.argv[1])
to = Destination(f"sqlite:///{folder}/mlflow.db", "tests", folder / "spools", 300)
tracker = start_run(to, sys.argv[2], "key", "seed 1", {}, {}, {})
for step in range(200):
    tracker.log_metrics(step, {"loss": step / 2})
tracker.end("FINISHED")
"""


def to(folder: Path, wait: float = 300) -> Destination:
    return Destination(f"sqlite:///{folder}/mlflow.db", "tests", folder / "spools", wait)


def begin(
    folder: Path,
    stage: str,
    key: str = "k1",
    resume: str | None = None,
    params: dict[str, str] | None = None,
    **tags: str,
) -> Tracker:
    return start_run(
        to(folder), stage, key, "seed 1", params or {f"{stage}.lr": "1e-5"}, {"seed": "1"}, tags, resume=resume
    )


def client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def run_of(folder: Path, tracker: Tracker) -> Run:
    """The one run that MLflow has of it."""
    (found,) = runs_of(folder, f"tags.`{RUN_KEY}` = '{tracker.run}'")
    return found


def runs_of(folder: Path, query: str = "") -> list[Run]:
    asked = client(folder)
    return asked.search_runs([asked.get_experiment_by_name("tests").experiment_id], query)


def parent_of(folder: Path, tracker: Tracker) -> Run:
    return client(folder).get_run(run_of(folder, tracker).data.tags["mlflow.parentRunId"])


def history(folder: Path, run: Run, name: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client(folder).get_metric_history(run.info.run_id, name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making one takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


def test_stages_of_one_pipeline_share_a_parent_whose_end_is_the_last_stages(folder: Path) -> None:
    first, other = begin(folder, "sft"), begin(folder, "sft", key="k2")
    first.end("FINISHED")
    other.end("KILLED")
    assert run_of(folder, first).info.status == parent_of(folder, first).info.status == "FINISHED"
    assert run_of(folder, other).info.status == "KILLED"
    second = begin(folder, "reward")
    second.end("FAILED")
    assert run_of(folder, second).info.status == parent_of(folder, second).info.status == "FAILED"
    assert parent_of(folder, second).info.run_id == parent_of(folder, first).info.run_id
    assert parent_of(folder, second).info.run_id != parent_of(folder, other).info.run_id
    assert parent_of(folder, first).info.run_name == "seed 1" and parent_of(folder, first).data.params == {"seed": "1"}


def test_equal_runs_of_two_clones_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one MLflow; unless both are told that they work on one run, as machines are that take it over from one another."""

    def parents() -> list[str]:
        found = []
        for clone in ("a", "a", "b"):
            there = Destination(f"sqlite:///{tmp_path}/mlflow.db", "tests", tmp_path / clone, 300)
            tracker = start_run(there, "sft", "k1", "seed 1", {}, {}, {})
            tracker.end("FINISHED")
            found.append(parent_of(tmp_path, tracker).info.run_id)
        return found

    first, again, other = parents()
    assert first == again != other
    monkeypatch.setenv("SOLO_RLHF_CHECKOUT", "results")
    assert len(set(parents())) == 1


def test_an_experiment_that_was_there_before_gets_the_table_of_pipeline_runs(tmp_path: Path) -> None:
    """One that somebody else made, or whose maker died before it had its tag; what a person has changed there stays."""
    name, view = COMPARISON
    made = client(tmp_path).create_experiment("tests")
    begin(tmp_path, "sft").end("FINISHED")
    assert client(tmp_path).get_experiment(made).tags[name] == view
    client(tmp_path).set_experiment_tag(made, name, "{}")
    begin(tmp_path, "reward").end("FINISHED")
    assert client(tmp_path).get_experiment(made).tags[name] == "{}"


def test_metrics_arrive_per_step_and_non_finite_ones_are_left_out(folder: Path) -> None:
    tracker = begin(folder, "ppo")
    for step in range(3):
        tracker.log_metrics(step, {"score": step / 2, "broken": float("nan"), "endless": float("inf")})
    tracker.summarize("ppo", {"win_rate": 0.75})
    tracker.end("FINISHED")
    run = run_of(folder, tracker)
    assert history(folder, run, "score") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert set(run.data.metrics) == {"score", "final.win_rate"}
    assert parent_of(folder, tracker).data.metrics["ppo.win_rate"] == 0.75
    assert run.data.params == {"ppo.lr": "1e-5"}


def test_what_arrived_but_was_not_noted_is_one_row_when_sent_again(folder: Path) -> None:
    """A crash after delivery and before its note: the whole spool goes twice. MLflow's row has the time in its key."""
    tracker = begin(folder, "sft", key="k8")
    for step in range(3):
        tracker.log_metrics(step, {"loss": step / 2})
    tracker.log_table("samples", [{"prompt": "q"}])
    tracker.end("FINISHED")
    spool = Spool(to(folder).folder, tracker.run)
    spool.note(Delivered())
    time.sleep(0.01)  # another millisecond, so that a row made anew would differ
    assert deliver(spool, Store.connect(to(folder).uri, folder / "lock"), print) > 0
    run = run_of(folder, tracker)
    assert history(folder, run, "loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(runs_of(folder, "tags.`pipeline.key` LIKE 'k8-%'")) == 1
    assert json.loads(artifact(folder, run, "samples.json"))["data"] == [["q"]]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]


def test_a_resumed_run_goes_on_under_its_id_with_changed_parameters_as_tags(folder: Path) -> None:
    """Reports mlflow/mlflow#7046 and #4248: new keys are logged, changed ones become tags, each step is there once."""
    first = begin(folder, "ppo", key="k9", params={"lr": "1e-5", "r": "8"})
    for step in range(17):
        first.log_metrics(step, {"loss": step / 2})
    first.end("KILLED")
    second = begin(folder, "ppo", key="k9", resume=first.run, params={"lr": "1e-5", "r": "16", "seed": "1"})
    for step in range(10, 20):
        second.log_metrics(step, {"loss": step / 2})
    second.end("FINISHED")
    run = run_of(folder, second)
    assert run.data.params == {"lr": "1e-5", "r": "8", "seed": "1"}
    assert {k: v for k, v in run.data.tags.items() if k.startswith("param_drift")} == {"param_drift.r": "16"}
    assert history(folder, run, "loss") == [(step, step / 2) for step in range(20)]
    assert run.info.status == "FINISHED"


def test_a_value_over_the_limit_has_its_hash_and_its_whole_in_a_file(folder: Path) -> None:
    """Report huggingface/transformers#9210."""
    template = "x" * 7000
    tracker = begin(folder, "sft", params={"template": template, "r": "8"}, long="y" * 9000)
    tracker.end("FINISHED")
    run = run_of(folder, tracker)
    assert run.data.params["r"] == "8"
    assert run.data.params["template"] == f"sha256 {HASH_7000}, 7000 characters: {'x' * 200}…"
    assert json.loads(artifact(folder, run, "parameters.json"))["template"] == template
    assert run.data.tags["long"].endswith(f"9000 characters: {'y' * 200}…")
    assert artifact(folder, run, "tags/long.txt") == "y" * 9000


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("rejected.prompt has a turn with role 'tool'", "rejected.prompt has a turn with role _tool_"),
        ("a//b", "a/_/b"),
        ("../up", "_/up"),
        ("/root", "_/root"),
        ("é" * 300, None),
    ],
)
def test_a_name_that_mlflow_refuses_costs_no_metric(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, taken: str | None
) -> None:
    """Reasons of rejected rows become names of metrics, and they may hold quotes and dots."""
    tracker = begin(folder, "prepare", key="k6")
    tracker.log_metrics(0, {name: 2.0, "rows": 3.0})
    tracker.end("FINISHED")
    assert capsys.readouterr().out == ""
    found = run_of(folder, tracker).data.metrics
    assert found.pop("rows") == 3.0
    assert list(found.values()) == [2.0] and (taken is None or list(found) == [taken])


def test_a_run_is_linked_to_what_made_its_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the hash, so also where DVC took the input from its cache; another version of a package is said."""
    maker = begin(folder, "sft", key="k3", **{"version.torch": "2.0"})
    maker.set_tags({"output:artifacts/sft": "abc"})
    maker.end("FINISHED")
    user = begin(folder, "ppo", key="k4")
    user.link({"artifacts/sft": "abc", "artifacts/reward": "abd"}, {"torch": "2.1"})
    user.end("FINISHED")
    tags = run_of(folder, user).data.tags
    assert tags["upstream:artifacts/sft"] == run_of(folder, maker).info.run_id
    assert "upstream:artifacts/reward" not in tags
    assert capsys.readouterr().out == "artifacts/sft was made with torch 2.0, this stage runs with 2.1.\n"


def artifact(folder: Path, run: Run, name: str) -> str:
    """A file beside the database. Its address names no machine and no folder above mlruns."""
    assert run.info.artifact_uri == f"mlflow-artifacts:/tests/{run.info.run_id}/artifacts"
    return (folder / "mlruns/tests" / run.info.run_id / "artifacts" / name).read_text()


def test_tables_and_files_arrive_as_they_were(folder: Path, tmp_path: Path) -> None:
    """Also where DVC removes a file before it is delivered."""
    tracker = begin(folder, "evaluate")
    tracker.log_table("samples/step_0", [{"prompt": "q", "gap": 1.5}, {"prompt": "r", "gap": float("nan")}])
    (tmp_path / "note.txt").write_text("hello")
    tracker.log_file(tmp_path / "note.txt")
    (tmp_path / "note.txt").unlink()
    tracker.end("FINISHED")
    run = run_of(folder, tracker)
    assert json.loads(artifact(folder, run, "samples/step_0.json")) == {
        "columns": ["prompt", "gap"],
        "data": [["q", 1.5], ["r", None]],
    }
    assert artifact(folder, run, "note.txt") == "hello"


def test_an_experiment_of_another_machine_costs_files_but_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report mlflow/mlflow#6515: its place for files cannot be written; said at once, and they come when it can."""
    (tmp_path / "in_the_way").write_text("")
    with pytest.raises(Unavailable, match="File exists"):
        Store.connect(f"sqlite:///{tmp_path}/in_the_way/mlflow.db", tmp_path / "lock")
    client(tmp_path).create_experiment("tests", artifact_location=str(tmp_path / "in_the_way" / "mlruns"))
    tracker = begin(tmp_path, "sft")
    tracker.log_metrics(0, {"loss": 1.0})
    tracker.end("FINISHED")
    said = capsys.readouterr().out
    assert "MLflow did not take parameters.json (parameters.json cannot be written to" in said
    assert "1 entries of this stage have not reached MLflow yet" in said
    assert run_of(tmp_path, tracker).data.metrics == {"loss": 1.0}
    assert run_of(tmp_path, tracker).info.status == "FINISHED"
    (tmp_path / "in_the_way").unlink()
    monkeypatch.setattr(sync_tracking, "destination", lambda runtime: to(tmp_path))
    monkeypatch.chdir(ROOT)
    sync_tracking.main()
    said = capsys.readouterr().out
    assert said == f"{tracker.run}: 1 entries delivered\nNothing is waiting: MLflow has everything.\n"
    assert list((tmp_path / "in_the_way" / "mlruns").rglob("parameters.json"))


def test_a_database_that_another_process_has_locked_is_waited_for(folder: Path) -> None:
    """Report mlflow/mlflow#6490. A writer holds it alone for two seconds; the stage neither waits nor loses a figure."""
    holder = sqlite3.connect(folder / "mlflow.db", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(2, lambda: holder.execute("ROLLBACK"))
    release.start()
    started = time.monotonic()
    tracker = begin(folder, "sft", key="k7")
    for step in range(5):
        tracker.log_metrics(step, {"loss": 1.0})
    assert time.monotonic() - started < 2
    tracker.end("FINISHED")
    release.join()
    holder.close()
    assert history(folder, run_of(folder, tracker), "loss") == [(step, 1.0) for step in range(5)]


def test_two_writers_of_a_new_database_lose_nothing(tmp_path: Path) -> None:
    """Report mlflow/mlflow#6490: both make the database, the experiment and the parent, and log 200 steps each, at once."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), stage], cwd=ROOT, env=os.environ)
        for stage in ("reward", "judge")
    ]
    assert [writer.wait(550) for writer in writers] == [0, 0]
    runs = {run.info.run_name: run for run in runs_of(tmp_path)}
    assert len(runs_of(tmp_path)) == 3 and set(runs) == {"seed 1", "reward", "judge"}
    for stage in ("reward", "judge"):
        assert history(tmp_path, runs[stage], "loss") == [(step, step / 2) for step in range(200)]
        assert runs[stage].info.status == "FINISHED"


def test_figures_go_to_the_main_checkout_from_a_copy_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`dvc exp run --temp` runs in a copy; tests/test_dvc.py asks DVC what it sets DVC_ROOT to."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    runtime = RuntimeParams.model_construct(tracking_uri="sqlite:///mlflow.db", experiment="e", tracking_wait=3.0)
    main = tmp_path / "main"
    assert destination(runtime) == Destination(f"sqlite:///{main}/mlflow.db", "e", main / ".work/tracking", 3.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert destination(runtime).uri == "http://127.0.0.1:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////data/mlflow.db")
    assert destination(runtime).uri == "sqlite:////data/mlflow.db"
    monkeypatch.delenv("DVC_ROOT")
    assert destination(runtime).folder == tmp_path / "copy" / ".work/tracking"
