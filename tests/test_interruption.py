"""Signals to the stage, to DVC and to both; DVC's death; a second process: with the real DVC and a stage that does nothing else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from pipeline.errors import UserError
from pipeline.lock import alone_in, is_held
from pipeline.preflight import refuse_second_dvc

# What every stage does: it waits for a poll, says what stopped it, writes what must not be lost, and leaves.
STAGE = """
import os, sys, time
from pathlib import Path
from pipeline import interruption
from pipeline.lock import alone_in
def work():
    Path("started").write_text(str(os.getpid()))
    for _ in range(3000):
        time.sleep(0.02)
        if not Path("deaf").exists():
            interruption.poll()
try:
    with interruption.listening(), alone_in(Path(".work"), "stage s"):
        try:
            work()
        except interruption.Interrupted as stop:
            time.sleep(0.3)  # writing a checkpoint takes its time
            Path("saved").write_text(stop.received.name)
            raise
except interruption.Interrupted as stop:
    Path("ended").write_text(stop.received.name)
    sys.exit(stop.exit_status)
"""
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "DVC_NO_ANALYTICS": "1",
}


@pytest.fixture(params=["sh", "bash"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DVC starts commands with. Bash makes way for its last command; Debian's sh stays between DVC and the stage."""
    monkeypatch.setitem(ENVIRONMENT, "SHELL", shutil.which(request.param) or pytest.skip(f"no {request.param} here"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A DVC project of one stage."""
    (tmp_path / "s.py").write_text(STAGE)
    (tmp_path / "dvc.yaml").write_text("stages:\n  s:\n    cmd: python s.py\n    outs: [out]\n")
    subprocess.run(["dvc", "init", "--no-scm", "-q"], cwd=tmp_path, env=ENVIRONMENT, check=True)
    return tmp_path


def started(project: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """A command in a process group of its own, and the stage's process id once it listens."""
    running = subprocess.Popen(
        words, cwd=project, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: (project / "started").exists() and (project / "started").read_text())
    return running, int((project / "started").read_text())


def wait_for(condition: Callable[[], object], seconds: int = 120) -> None:
    """At most so long: the machine may be busy."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """The process has ended, whether or not somebody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def to_stage(running: subprocess.Popen[str], stage: int) -> None:
    os.kill(stage, signal.SIGTERM)


def to_dvc(running: subprocess.Popen[str], stage: int) -> None:
    running.terminate()


def killing_dvc(running: subprocess.Popen[str], stage: int) -> None:
    running.kill()


def to_group(running: subprocess.Popen[str], stage: int) -> None:
    os.killpg(running.pid, signal.SIGTERM)


def control_c(running: subprocess.Popen[str], stage: int) -> None:
    os.killpg(running.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (to_stage, "SIGTERM"),
        (to_dvc, "SIGUSR2"),
        (killing_dvc, "SIGUSR2"),
        (to_group, "SIGTERM"),
        (control_c, "SIGINT"),
    ],
    ids=["stage", "dvc", "dvc killed", "group", "control-c"],
)
def test_however_it_is_stopped_the_stage_saves_and_ends_and_dvc_takes_no_output(
    shell: None, project: Path, send: Callable, reason: str
) -> None:
    """Where the group is ended, the stage gets the signal and, a moment later, word of DVC's death: that is no second signal."""
    running, stage = started(project, "dvc", "repro")
    send(running, stage)
    assert running.wait(120) != 0
    wait_for(lambda: gone(stage))
    assert (project / "saved").read_text() == reason
    assert not (project / "dvc.lock").exists()
    assert not is_held(project / ".work")


def test_a_second_signal_does_not_wait(project: Path) -> None:
    (project / "deaf").touch()
    running, _ = started(project, sys.executable, "s.py")
    running.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.5)
    running.terminate()
    assert running.wait(60) == -signal.SIGTERM
    assert "SIGTERM: stopping where nothing is lost; once more: at once." in running.stdout.read()
    assert not (project / "saved").exists()


def test_started_by_hand_a_stage_outlives_the_shell(project: Path) -> None:
    """As with `nohup python -m stages.ppo &`: nobody asked for its end."""
    shell = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} s.py & sleep 30"], cwd=project, env=ENVIRONMENT, start_new_session=True
    )
    wait_for(lambda: (project / "started").exists() and (project / "started").read_text())
    stage = int((project / "started").read_text())
    shell.kill()
    shell.wait()
    time.sleep(0.5)
    assert not gone(stage)
    os.kill(stage, signal.SIGKILL)


def test_a_stage_whose_dvc_died_before_it_listened_ends(project: Path) -> None:
    """Importing torch takes seconds. The shell ends at once, so that the stage is an orphan when it starts to listen."""
    late = (project / "s.py").read_text().replace("try:", "time.sleep(1)\ntry:", 1)
    (project / "late.py").write_text(late)
    subprocess.run(
        ["sh", "-c", f"{sys.executable} late.py &"], cwd=project, env=ENVIRONMENT | {"DVC_STAGE": "s"}, check=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: (project / "ended").exists() and (project / "ended").read_text())
    assert (project / "ended").read_text() == "SIGUSR2"
    assert not (project / "started").exists()


def test_a_second_process_is_told_so_in_one_sentence(project: Path) -> None:
    """Also beside a stage that was killed just now: the system frees its lock."""
    running, stage = started(project, sys.executable, "s.py")
    with (
        pytest.raises(
            UserError, match=rf"stage s is running already, as process {stage}; .* stop it with `kill {stage}`"
        ),
        alone_in(project / ".work", "stage s"),
    ):
        pass
    running.kill()
    running.wait()
    with alone_in(project / ".work", "stage s"):
        assert is_held(project / ".work")
    assert not is_held(project / ".work")


def write_rwlock(folder: Path, pid: int) -> Path:
    file = folder / "rwlock"
    file.write_text(json.dumps({"read": {}, "write": {"/p/out": {"pid": pid, "cmd": "/bin/dvc repro"}}}))
    return file


def test_a_second_dvc_is_told_of_the_first(project: Path) -> None:
    """Report iterative/dvc#9723. The file is DVC's own, as it writes it while a stage runs."""
    running, stage = started(project, "dvc", "repro")
    with pytest.raises(UserError, match=f"dvc is at work here already, as process {running.pid}; wait for its end"):
        refuse_second_dvc(project / ".dvc/tmp/rwlock")
    second = subprocess.run(["dvc", "repro"], cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert second.returncode != 0 and f"(PID {running.pid})" in second.stderr  # what DVC itself says: eight lines
    os.killpg(running.pid, signal.SIGTERM)
    running.wait(120)
    wait_for(lambda: gone(stage))
    refuse_second_dvc(project / ".dvc/tmp/rwlock")


def test_what_a_killed_dvc_left_is_named_with_what_to_remove(tmp_path: Path) -> None:
    """Report iterative/dvc#9723, and #3370: in a container numbers of processes come again."""
    refuse_second_dvc(tmp_path / "rwlock")
    refuse_second_dvc(write_rwlock(tmp_path, pid=2**22 + 1))  # nobody: DVC frees it by itself
    other = subprocess.Popen(["sleep", "60"])
    with pytest.raises(
        UserError, match=rf"process {other.pid} is a dvc at work here, but it is 'sleep 60'.*remove .*rwlock"
    ):
        refuse_second_dvc(write_rwlock(tmp_path, other.pid))
    other.kill()
    other.wait()
    (tmp_path / "rwlock").write_text("{")
    with pytest.raises(UserError, match="rwlock is damaged, as after a crash: remove it"):
        refuse_second_dvc(tmp_path / "rwlock")
