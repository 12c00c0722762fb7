"""`make doctor`: each thing as it should be, and each way in which it is often not."""

import re
import socket
import sqlite3
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from rich.console import Console

from pipeline.doctor import gpu, services
from pipeline.doctor.__main__ import table
from pipeline.doctor.checkout import look_at, look_at_dvc, look_at_git
from pipeline.doctor.findings import Finding
from pipeline.doctor.gpu import WORST, look_at_gpu, look_at_quantization
from pipeline.doctor.machine import look_at_disk, look_at_packages, look_at_python
from pipeline.doctor.services import look_at_docker, look_at_mlflow, look_at_port
from pipeline.errors import DataError
from pipeline.preflight import refuse_second_dvc
from pipeline.tracking.destination import Destination
from pipeline.tracking.spool import Spool

CARD = "NVIDIA GeForce RTX 3090, 470.82, 24576 MiB, 12 MiB"


def one(findings: Iterable[Finding]) -> Finding:
    (found,) = findings
    return found


def said(found: Finding) -> str:
    return f"{found.state}: {found.text} → {found.remedy}"


# --- the machine ---


def test_another_python() -> None:
    assert one(look_at_python()).state == "ok"
    assert "install Python 3.11" in said(one(look_at_python((3, 12))))


def test_packages_that_are_not_as_locked(tmp_path: Path) -> None:
    """What follows a plus is how a package was built, and torch's always has such a part."""
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"# head\ntorch=={torch.__version__.partition('+')[0]}\n", encoding="utf-8")
    assert said(one(look_at_packages((lock,)))) == "ok: 1, all as locked → "
    lock.write_text("torch==1.0.0\nno-such-package==1\npytest==0.1\npeft==0.1\n", encoding="utf-8")
    found = one(look_at_packages((lock,)))
    assert re.match(
        r"fix: not as locked: torch \S+, no-such-package is missing, pytest \S+ and 1 more → rm -r .venv", said(found)
    )


def test_a_disk_without_room_and_one_that_is_not_ours(tmp_path: Path) -> None:
    """/proc takes no file of anybody, root included."""
    assert one(look_at_disk({"checkout": tmp_path / "not" / "yet"}, scarce=0)).state == "ok"
    assert said(one(look_at_disk({"models": tmp_path}, scarce=10**18))).startswith("note: models: ")
    assert said(one(look_at_disk({"models": Path("/proc/x")}))).startswith("fix: models: /proc cannot be written to: ")


def test_a_gpu_that_torch_does_not_see() -> None:
    unusable = partial(look_at_gpu, usable=lambda: False)
    assert said(one(unusable("auto", lambda: None))) == "note: none: stages run on the CPU → "
    assert said(one(unusable("cuda", lambda: None))).startswith("fix: none: stages run on the CPU → set runtime.device")
    for_cpu = one(unusable("auto", lambda: CARD, None))
    assert said(for_cpu).startswith(f"fix: {CARD}; but torch {torch.__version__} is a build for the CPU → ")
    too_old = one(unusable("auto", lambda: CARD, "13.0"))
    assert said(too_old).startswith(f"fix: {CARD}; but torch, built for CUDA 13.0, cannot use it → install a driver")


def test_nf4_by_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest gap of NF4 is from -1 to -0.6962: a weight in its middle is 0.1519 of its block's largest off."""
    assert pytest.approx((1 - 0.6962) / 2, abs=1e-4) == 0.1519 and 0.1519 < WORST < 0.165
    assert one(look_at_quantization(torch.device("cpu"))).state == "ok"
    monkeypatch.setattr(gpu, "dequantize_4bit", lambda quantised, state: torch.zeros(64, 64))
    assert said(one(look_at_quantization(torch.device("cpu")))).startswith(
        "fix: NF4 on cpu gives wrong numbers: a weight is 100%"
    )


def test_bitsandbytes_that_does_not_work_here() -> None:
    assert said(one(look_at_quantization(torch.device("meta")))).startswith("fix: does not work on meta: ")


# --- services ---


@pytest.mark.parametrize(
    ("script", "gpu_there", "expected"),
    [
        (
            'echo "permission denied while trying to connect" >&2; exit 1',
            False,
            "note: permission denied .* → sudo usermod",
        ),
        ('echo "Cannot connect to the Docker daemon" >&2; exit 1', False, "note: Cannot connect .* → start it"),
        ('[ $1 = info ] && echo "28.2 map[runc:]" || exit 1', False, "note: docker compose is missing → install"),
        ('echo "28.2 map[runc:]"', False, "ok: engine 28.2, with compose → "),
        ('echo "28.2 map[runc:]"', True, "note: it does not hand out the GPU → install NVIDIA's"),
        ('echo "28.2 map[nvidia: runc:]"', True, "ok: engine 28.2, with compose → "),
    ],
)
def test_docker(script: str, gpu_there: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(services.shutil, "which", lambda name: str(program))
    assert re.match(expected, said(one(look_at_docker(gpu_there))))


def test_no_docker_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.shutil, "which", lambda name: None)
    assert said(one(look_at_docker(False))).startswith("note: not installed")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert said(one(look_at_port(port))).endswith(f"→ make ui PORT={port + 1}")
    assert one(look_at_port(port)).state == "ok"


@pytest.fixture
def to(tmp_path: Path) -> Destination:
    return Destination(f"sqlite:///{tmp_path / 'mlflow.db'}", "solo-rlhf", tmp_path / "tracking", 1.0)


def test_mlflow_before_its_first_run_and_after(to: Destination, tmp_path: Path) -> None:
    assert said(one(look_at_mlflow(to))) == "ok: mlflow.db is made by the first stage → "
    assert not (tmp_path / "mlflow.db").exists()
    MlflowClient(to.uri).search_experiments()
    assert said(one(look_at_mlflow(to))).startswith("ok: sqlite:///")


def test_a_database_of_another_version(to: Destination, tmp_path: Path) -> None:
    MlflowClient(to.uri).search_experiments()
    other = f"sqlite:///{tmp_path / 'old.db'}"
    with sqlite3.connect(tmp_path / "mlflow.db") as now, sqlite3.connect(tmp_path / "old.db") as old:
        now.backup(old)
        old.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")  # MLflow's of 2019
    found = one(look_at_mlflow(Destination(other, to.experiment, to.folder, to.wait)))
    assert said(found) == f"fix: {other} is of another version of MLflow → mlflow db upgrade '{other}'"


def test_a_damaged_database(to: Destination, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"\7" * 5000)
    assert re.match("fix: .*mlflow.db is damaged: .* → mv ", said(one(look_at_mlflow(to))))


def test_a_server_that_is_away_keeps_its_password_and_leaves_figures_waiting(to: Destination) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    to.folder.mkdir()
    spool = Spool(to.folder, "run")
    spool.append("tags", tags={"a": "b"})
    away = Destination(f"http://user:secret-word@127.0.0.1:{port}", to.experiment, to.folder, to.wait)
    silent, waiting = look_at_mlflow(away)
    assert said(silent).startswith(f"note: http://***@127.0.0.1:{port} does not answer: ")
    assert "secret-word" not in said(silent)
    assert said(waiting) == "note: 1 entries wait to be delivered → make sync-tracking"


# --- the checkout ---


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=folder, check=True, capture_output=True
    )


def test_git_from_no_repository_to_a_clean_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "nobody"))
    assert said(one(look_at_git())).startswith("fix: this is no git repository")
    git(tmp_path, "init")
    assert said(one(look_at_git())).startswith("fix: there is no commit yet")
    (tmp_path / "a").write_text("a", encoding="utf-8")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    assert "git config user.email" in said(next(look_at_git()))
    git(tmp_path, "config", "user.email", "t@t")
    assert re.match("ok: at [0-9a-f]+, nothing uncommitted", said(one(look_at_git())))
    (tmp_path / "b").write_text("b", encoding="utf-8")
    assert said(one(look_at_git())).startswith("note: 1 files differ")


def test_a_lock_file_after_a_merge(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    lock.write_text("schema: '2.0'\nstages:\n<<<<<<< HEAD\n  sft:\n=======\n  ppo:\n>>>>>>> other\n", encoding="utf-8")
    assert said(one(look_at_dvc(lambda: None, (lock,)))).startswith(
        f"fix: {lock} cannot be read, as after a merge → git checkout"
    )
    lock.write_text("schema: '2.0'\nstages: {}\n", encoding="utf-8")
    assert one(look_at_dvc(lambda: None, (lock, tmp_path / "absent.lock"))).state == "ok"


def test_the_mark_of_a_dvc_that_was_killed(tmp_path: Path) -> None:
    """Its number is another process's now: DVC would wait for ever (docs/faults.md)."""
    rwlock = tmp_path / "rwlock"
    rwlock.write_text('{"write": {"x": {"pid": 1, "cmd": "dvc repro"}}}', encoding="utf-8")
    assert "remove" in said(one(look_at_dvc(lambda: refuse_second_dvc(rwlock), ())))


def test_what_says_itself_what_is_wrong() -> None:
    def faulty() -> str:
        raise DataError("data.pairs is not there")

    assert said(one(look_at("data", faulty))) == "fix: data.pairs is not there → "
    assert said(one(look_at("data", lambda: "all there"))) == "ok: all there → "


def test_a_remedy_stands_below_what_it_is_for() -> None:
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as printed:
        console.print(table([Finding("git", "note", "2 files differ", "commit"), Finding("port", "ok", "free")]))
    lines = [line.rstrip() for line in printed.get().splitlines()]
    assert lines == ["note  git   2 files differ", "            → commit", "ok    port  free"]
