"""How a stage ends: what it says, what it leaves in .work, and with which status."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from pipeline import interruption
from pipeline.errors import StorageError, TrainingError
from pipeline.lock import alone_in
from pipeline.stage import Stage, run_stage


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the DVC files and the smoke recipe; no input is there, and MLflow is out of reach."""
    (tmp_path / "alternatives").mkdir()
    for name in ("dvc.yaml", "alternatives/dvc.yaml"):
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copy2(ROOT / "recipes/smoke.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nothing/mlflow.db")
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def ended(body: Callable[[Stage], None]) -> int:
    """The exit status."""
    try:
        run_stage("sft", body)
    except SystemExit as end:
        return end.code
    return 0


def folders(project: Path) -> list[Path]:
    return [path for path in (project / ".work/sft").iterdir() if path.is_dir()]


def test_a_stage_that_has_finished_leaves_no_state(project: Path) -> None:
    def body(stage: Stage) -> None:
        (stage.folder / "step-000001").mkdir()
        for path in ("artifacts/sft", "metrics/sft.json", "plots/sft.tsv"):
            Path(path).mkdir(parents=True)

    assert ended(body) == 0
    assert folders(project) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_training_keeps_the_state_and_says_where_it_goes_on(
    project: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def body(stage: Stage) -> None:
        stage.on_stop = lambda: f"after step 3, which is kept in {stage.folder}"
        interruption.wait_for_polls()
        os.kill(os.getpid(), number)
        interruption.poll()

    assert ended(body) == 128 + number
    (folder,) = folders(project)
    said = (
        f"sft: stopped by {number.name}; the next run goes on after step 3, which is kept in .work/sft/{folder.name}."
    )
    assert said in capsys.readouterr().out


def test_a_signal_before_training_does_not_wait(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(_: Stage) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    assert ended(body) == 143
    assert "sft: stopped by SIGTERM; the next run goes on from its start." in capsys.readouterr().out


def test_a_failure_keeps_the_last_good_state_but_a_full_disk_is_not_written_to(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def failing(error: Exception) -> Callable[[Stage], None]:
        def body(stage: Stage) -> None:
            stage.on_stop = lambda: asked.append(type(error).__name__) or "after step 3, which is kept in x"
            raise error

        return body

    assert ended(failing(TrainingError("NaN everywhere."))) == 1
    assert ended(failing(StorageError("No room."))) == 1
    assert asked == ["TrainingError"]
    said = capsys.readouterr().out
    assert "sft: with the same parameters the next run goes on after step 3, which is kept in x." in said
    assert "sft: NaN everywhere." in said
    assert "sft: No room." in said


def test_an_experiment_in_a_copy_keeps_its_state_in_the_main_checkout(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`dvc exp run --temp` and `--queue` name it in DVC_ROOT, and remove the copy at the end."""
    main = tmp_path_factory.mktemp("main")
    monkeypatch.setenv("DVC_ROOT", str(main))

    def body(stage: Stage) -> None:
        assert stage.folder.parent == main / ".work/sft"
        raise TrainingError("enough")

    assert ended(body) == 1
    assert len(folders(main)) == 1 and folders(project) == []


def test_a_second_process_leaves_with_one_sentence(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone_in(project / ".work/sft", "stage sft"):
        assert ended(lambda _: None) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"sft: stage sft is running already, as process {os.getpid()};")
