"""A finished stage's training state is kept until DVC has its outputs, and no longer."""

from pathlib import Path

import pytest

from pipeline.finished import leave, sweep
from pipeline.lock import alone_in

EARLIER = "stages:\n  sft:\n    outs:\n    - {path: metrics.json, md5: 0a12}\n    - {path: artifacts, md5: 4b67.dir}\n"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state with one checkpoint; DVC's lock file is of a run before, and metrics.json is of this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "sft")
    folder = tmp_path / ".work" / "sft" / "key"
    (folder / "step-000001").mkdir(parents=True)
    Path("dvc.lock").write_text(EARLIER)
    Path("metrics.json").write_text("{}")
    return folder


def taken() -> None:
    """What DVC does when it has taken the outputs: 99914b932bd37a50b983c5e7c90ae93b is the MD5 of {}."""
    Path("dvc.lock").write_text(EARLIER.replace("0a12", "99914b932bd37a50b983c5e7c90ae93b"))


def test_the_state_stays_until_dvc_has_the_outputs(state: Path) -> None:
    leave(state, "sft", Path("dvc.lock"))
    for _ in range(2):  # DVC was killed before it took them; whoever starts next finds the state
        sweep(state.parents[1])
        assert (state / "step-000001").exists()
    taken()
    sweep(state.parents[1])
    assert not state.exists()


def test_the_first_run_of_all_has_no_entry_yet(state: Path) -> None:
    Path("dvc.lock").unlink()
    leave(state, "sft", Path("dvc.lock"))
    sweep(state.parents[1])
    assert state.exists()
    taken()
    sweep(state.parents[1])
    assert not state.exists()


def test_a_result_that_dvc_has_already_is_not_waited_for(state: Path) -> None:
    """`dvc repro --force`: the lock file does not change, so the next forced run would find an old state, and train nothing."""
    taken()
    leave(state, "sft", Path("dvc.lock"))
    assert not state.exists()


def test_without_dvc_nothing_is_waited_for(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DVC_STAGE")
    leave(state, "sft", Path("dvc.lock"))
    assert not state.exists()


def test_the_state_of_a_copy_that_is_gone_goes(state: Path, tmp_path: Path) -> None:
    """`dvc exp run --temp` removes the copy in which it ran."""
    leave(state, "sft", tmp_path / "gone" / "dvc.lock")
    sweep(state.parents[1])
    assert not state.exists()


def test_a_state_in_use_is_left_alone(state: Path) -> None:
    leave(state, "sft", Path("dvc.lock"))
    taken()
    with alone_in(state, "stage sft"):
        sweep(state.parents[1])
        assert state.exists()
