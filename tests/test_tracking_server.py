"""A real MLflow server on a loopback port, killed and started again under a run; and what it is never told."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from test_tracking import history, run_of

from pipeline.tracking.destination import Destination
from pipeline.tracking.tracker import start_run

STEPS = 30
PARAMETERS = {"runtime.tracking_uri": "http://me:hunter2@127.0.0.1", "note": "with hf_abcdefgh in it"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def server(folder: Path, port: int) -> Iterator[None]:
    """`make ui` on another port, until it is killed without a word."""
    words = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", "sqlite:///mlflow.db"]
    words += ["--artifacts-destination", "mlruns", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("ab") as log:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(1000):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert process.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_away_at_the_start_and_for_the_middle_third_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run and parent do not exist when the first steps are logged. No secret is printed, spooled or sent, although the
    address has a password and the environment a token. What SQLite has, a server elsewhere shows, with its files."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    port = free_port()
    spools, data = tmp_path / "spools", tmp_path / "data"
    data.mkdir()
    to = Destination(f"http://me:hunter2@127.0.0.1:{port}", "tests", spools, 300)
    tracker = start_run(to, "ppo", "key", "seed 1", PARAMETERS, PARAMETERS, {"note": "hf_abcdefgh"})
    spool = tracker.spool

    def log(steps: range) -> None:
        for step in steps:
            tracker.log_metrics(step, {"loss": step / 2})
        tracker.log_table(f"samples/step_{steps.stop:02d}", [{"prompt": f"q{steps.stop}"}])

    def until_delivered() -> None:
        limit = time.monotonic() + 200
        while spool.waiting():
            assert time.monotonic() < limit, "nothing arrives"
            time.sleep(0.1)

    log(range(5))
    with server(data, port):
        log(range(5, STEPS // 3))
        until_delivered()
    log(range(STEPS // 3, 2 * STEPS // 3))
    time.sleep(2.5)  # the server is tried, and is away
    assert spool.waiting() == STEPS // 3 + 1
    with server(data, port):
        log(range(2 * STEPS // 3, STEPS))
        tracker.end("FINISHED")
        assert spool.waiting() == 0
        run = run_of(data, tracker)
        assert history(data, run, "loss") == [(step, step / 2) for step in range(STEPS)]
        assert run.info.status == "FINISHED"
        asked = MlflowClient(f"http://127.0.0.1:{port}")
        tables = [found.path for found in asked.list_artifacts(run.info.run_id, "samples")]
        assert tables == [f"samples/step_{step}.json" for step in ("05", "10", "20", "30")]
        # an experiment that was made beside the database, by no server
        beside = Destination(f"sqlite:///{data}/mlflow.db", "beside", spools, 300)
        other = start_run(beside, "sft", "key", "seed 1", {}, {}, {})
        other.log_table("samples", [{"prompt": "q"}])
        other.end("FINISHED")
        experiment = asked.get_experiment_by_name("beside")
        assert experiment.artifact_location == "mlflow-artifacts:/beside"
        (shown,) = asked.search_runs([experiment.experiment_id], "attributes.run_name = 'sft'")
        table = Path(asked.download_artifacts(shown.info.run_id, "samples.json", str(tmp_path)))
        assert json.loads(table.read_text())["data"] == [["q"]]
    printed = capsys.readouterr().out
    assert printed.count("MLflow does not answer") == 1
    told = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} | {"printed": printed.encode()}
    assert sum(b"seed 1" in content for content in told.values()) >= 2  # of the spool and the database, at least
    assert [place for place, content in told.items() if b"hunter2" in content or b"hf_abcdefgh" in content] == [], (
        printed
    )
    assert run.data.params == {
        "runtime.tracking_uri": "http://***@127.0.0.1",
        "note": "with *** in it",
    }
