"""A stage in two processes that torchrun starts: signals, deaths and failures end both, and the next run goes on."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from ruamel.yaml import YAML
from several import ENVIRONMENT
from test_interruption import gone, wait_for

from pipeline.launch import _cause

SCRIPT = ROOT / "tests/launched.py"
MINUTE = 60


def project_in(folder: Path, **runtime: object) -> Path:
    """The DVC files and the smoke recipe, with changes of section `runtime`; MLflow is out of reach."""
    (folder / "alternatives").mkdir(parents=True)
    for name in ("dvc.yaml", "alternatives/dvc.yaml"):
        shutil.copy2(ROOT / name, folder / name)
    settings = {"launch": "ddp", "threads": 1, "checkpoint_steps": 1} | runtime
    set_runtime(folder, ROOT / "recipes/smoke.yaml", **settings)
    return folder


def set_runtime(folder: Path, recipe: Path, **changes: object) -> None:
    yaml = YAML()
    params = yaml.load(recipe.read_text(encoding="utf-8"))
    params["runtime"] |= changes
    yaml.dump(params, folder / "params.yaml")


@pytest.fixture
def begin(tiny_folders: Callable[..., Path]) -> Callable[..., subprocess.Popen[str]]:
    """Starts the stage in a project; its output goes to the file `said`."""

    def started(project: Path, stage: str = "sft", **environment: str) -> subprocess.Popen[str]:
        variables = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"}
        variables |= {"MLFLOW_TRACKING_URI": "sqlite:////proc/nothing/mlflow.db"} | environment
        words = [sys.executable, str(SCRIPT), stage, str(tiny_folders())]
        with (project / "said").open("w") as said:
            return subprocess.Popen(words, cwd=project, env=variables, stdout=said, stderr=said, start_new_session=True)

    return started


def held(project: Path) -> list[int]:
    """Process ids in the order of ranks, once both are at step 3, where they wait as long as the file `hold` is there."""
    # three processes import everything
    wait_for(lambda: all((project / f"at-3-{rank}").exists() for rank in range(2)), seconds=600)
    return [int((project / f"at-3-{rank}").read_text()) for rank in range(2)]


def let_go(project: Path, once_heard_by: int) -> None:
    """Ends the waiting once so many processes have heard that they are to stop."""
    wait_for(lambda: said(project).count("stopping where nothing is lost") == once_heard_by)
    (project / "hold").unlink()


def hashes(project: Path) -> list[str]:
    return [(project / f"hash-{rank}").read_text() for rank in range(2)]


def said(project: Path) -> str:
    return (project / "said").read_text()


@pytest.fixture(scope="module")
def undisturbed(
    tiny_folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[str]]:
    """What a stage's two processes have at the end if nothing happens to them."""

    def of(stage: str, launch: str) -> list[str]:
        project = project_in(tmp_path_factory.mktemp(stage), launch=launch)
        assert begin.__wrapped__(tiny_folders)(project, stage).wait() == 0, said(project)
        return hashes(project)

    return of


@pytest.mark.parametrize(("stage", "launch", "rank"), [("sft", "ddp", 1), ("ppo", "ddp", 0), ("sft", "fsdp", 1)])
def test_a_killed_process_ends_all_within_a_minute_and_resumed_they_end_with_the_hashes_of_an_undisturbed_run(
    begin: Callable, undisturbed: Callable, tmp_path: Path, stage: str, launch: str, rank: int
) -> None:
    project = project_in(tmp_path / "project", launch=launch)
    (project / "hold").touch()
    running = begin(project, stage)
    workers = held(project)
    os.kill(workers[rank], signal.SIGKILL)
    (project / "hold").unlink()
    assert running.wait(MINUTE) == 1
    assert all(map(gone, workers))
    assert f"{stage}: process {rank} of 2 failed: Signal 9 (SIGKILL)" in said(project)

    assert begin(project, stage).wait() == 0, said(project)
    assert "goes on after" in said(project)
    assert hashes(project) == undisturbed(stage, launch)
    assert len(set(hashes(project))) == 1
    rows = (project / f"plots/{stage}.tsv").read_text().splitlines()
    assert len(rows) == 1 + {"sft": 6, "ppo": 5}[stage], "a step is missing from the curve, or is there twice"


@pytest.mark.parametrize("target", ["torchrun", "one process"])
def test_a_signal_stops_both_where_nothing_is_lost(begin: Callable, tmp_path: Path, target: str) -> None:
    project = project_in(tmp_path / "project")
    (project / "hold").touch()
    running = begin(project)
    workers = held(project)
    os.kill(running.pid if target == "torchrun" else workers[1], signal.SIGTERM)
    let_go(project, once_heard_by=2 if target == "torchrun" else 1)
    assert running.wait(MINUTE) == 128 + signal.SIGTERM, said(project)
    assert all(map(gone, workers))
    assert said(project).count("stopped by SIGTERM; the next run goes on after step 4") == 1


def test_another_number_of_processes_cannot_go_on_and_says_so_once(begin: Callable, tmp_path: Path) -> None:
    project = project_in(tmp_path / "project")
    (project / "fail-0").touch()
    assert begin(project).wait() == 1
    set_runtime(project, project / "params.yaml", processes=3)
    assert begin(project).wait() == 1
    assert said(project).count("was made by 2 process(es) and there are 3 now") == 1
    assert "Traceback" not in said(project)


def test_an_error_in_one_process_is_the_jobs_error(begin: Callable, tmp_path: Path) -> None:
    project = project_in(tmp_path / "project")
    (project / "fail-1").touch()
    running = begin(project)
    wait_for(lambda: (project / "at-2-1").exists(), seconds=600)
    assert running.wait(MINUTE) == 1
    last = said(project).strip().splitlines()[-1]
    assert last == "sft: process 1 of 2 failed: RuntimeError: a wheel came off"


def test_processes_do_not_outlive_the_one_that_started_them(begin: Callable, tmp_path: Path) -> None:
    project = project_in(tmp_path / "project")
    (project / "hold").touch()
    running = begin(project)
    workers = held(project)
    running.kill()
    let_go(project, once_heard_by=2)
    wait_for(lambda: all(map(gone, workers)))
    assert said(project).count("the next run goes on after step 4") == 1


@pytest.mark.parametrize(("launch", "count"), [("single", "2"), ("ddp", "4")])
def test_a_number_of_processes_that_nobody_asked_for_is_refused(
    begin: Callable, tmp_path: Path, launch: str, count: str
) -> None:
    """`accelerate launch` has been seen to start one process where two were asked for; clusters set these variables for themselves."""
    project = project_in(tmp_path / "project")
    set_runtime(project, project / "params.yaml", launch=launch)
    by_hand = {"RANK": "0", "WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "x"}
    assert begin(project, **by_hand).wait(MINUTE) == 1


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({1: (-9, "Signal 9"), 0: (1, "PeerLostError: gone")}, "process 1 of 2 failed: Signal 9"),
        ({0: (1, "PeerLostError: gone"), 1: (1, "ValueError: 3")}, "process 1 of 2 failed: ValueError: 3"),
        ({1: (-9, "Signal 9"), 0: (-15, "Signal 15")}, "process 1 of 2 failed: Signal 9"),
        ({1: (1, "DataError: x"), 0: (1, "DataError: x")}, "process 1 of 2 failed: DataError: x"),
    ],
)
def test_the_cause_is_no_failure_that_another_has_caused(failures: dict, message: str) -> None:
    """All within one second, which is as fine as torchrun's clock is."""
    told = {
        rank: SimpleNamespace(exitcode=status, message=text, timestamp=7) for rank, (status, text) in failures.items()
    }
    assert str(_cause(told, 2)) == message
