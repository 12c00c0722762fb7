"""DVC's remote: what one clone has done is not done again in another; and deploy/run.sh, on machines that are taken away."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from test_end_to_end import ENVIRONMENT, clone_to, edited, output_hashes, run, stages_run

STAGE = "sft"  # with prepare before it: two stages are as good as six


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare repository on the smoke recipe, whose default DVC remote is a folder beside it."""
    folder = tmp_path_factory.mktemp("origin")
    clone = clone_to(folder / "clone")
    done(run(clone, "dvc", "remote", "add", "--default", "store", str(folder / "store")))
    done(run(clone, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", "remote"))
    done(run(clone, "git", "branch", "-M", "main"))
    done(run(folder, "git", "clone", "-q", "--bare", "clone", "bare"))
    return folder / "bare"


def done(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def cloned(origin: Path, to: Path) -> Path:
    done(run(to.parent, "git", "clone", "-q", "--branch", "main", str(origin), to.name))
    return to


@pytest.fixture(scope="module")
def first(origin: Path) -> tuple[Path, str]:
    """A machine on which deploy/run.sh has run, and what it printed."""
    folder = cloned(origin, origin.with_name("first"))
    return folder, done(run(folder, "sh", "deploy/run.sh", STAGE))


def test_a_fresh_clone_pulls_and_has_nothing_to_do(origin: Path, first: tuple[Path, str], tmp_path: Path) -> None:
    """dvc.lock and the tables come with Git, the rest with `dvc pull`."""
    folder, printed = first
    assert stages_run(printed) == ["prepare", "sft"]
    second = tmp_path / "second"
    done(run(tmp_path, "git", "clone", "-q", "--branch", "results", str(origin), "second"))
    assert not (second / "artifacts/sft").exists()
    done(run(second, "dvc", "pull", "--allow-missing"))
    again = done(run(second, "dvc", "repro", STAGE))
    assert stages_run(again) == [] and "up to date" in again
    assert output_hashes(second) == output_hashes(folder)
    weights = "artifacts/sft/adapter_model.safetensors"
    assert (second / weights).read_bytes() == (folder / weights).read_bytes()


def test_another_machine_takes_up_what_the_first_has_sent(
    origin: Path, first: tuple[Path, str], tmp_path: Path
) -> None:
    """It starts from main, as SkyPilot's recovery does, and runs nothing again; a stage that is then changed is run."""
    second = cloned(origin, tmp_path / "second")
    assert stages_run(done(run(second, "sh", "deploy/run.sh", STAGE))) == []
    with edited(second, {"sft.epochs": 2}):
        dry = run(second, "dvc", "repro", "--dry", STAGE)
    assert stages_run(done(dry)) == ["sft"]


def test_a_stage_that_fails_sends_nothing(origin: Path, tmp_path: Path) -> None:
    folder = cloned(origin, tmp_path / "clone")
    with (folder / "params.yaml").open("a") as stream:
        stream.write("unknown: 1\n")
    failed = subprocess.run(
        ["sh", "deploy/run.sh", STAGE], cwd=folder, env=ENVIRONMENT | {"RESULTS": "failed"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert failed.returncode != 0 and "unknown is not a section" in failed.stdout
    assert "failed" not in run(folder, "git", "ls-remote", "--heads", "origin").stdout


def test_the_script_can_be_run() -> None:
    assert os.access(ROOT / "deploy/run.sh", os.X_OK)
