"""Docker, the port of MLflow's pages, and where figures go."""

import shutil
import socket
import sqlite3
import subprocess  # nosec B404
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from pipeline.doctor.findings import Finding
from pipeline.masking import masked
from pipeline.tracking.destination import SQLITE, Destination
from pipeline.tracking.runs import Unavailable
from pipeline.tracking.spool import spools
from pipeline.tracking.store import Store
from pipeline.tracking.tracker import STORE_LOCK

UI_PORT = 5000
START, JOIN = "start it, for example sudo systemctl start docker", "sudo usermod -aG docker $USER, then log in again"


def look_at_docker(gpu: bool) -> Iterator[Finding]:
    """The engine, its compose, and with a GPU its runtime. None of it is needed but for containers."""
    program = shutil.which("docker")
    if program is None:
        yield Finding("Docker", "note", "not installed: stages run without it, in .venv")
        return
    version, error = _asked(program, "info", "--format", "{{.ServerVersion}} {{.Runtimes}}")
    if error:
        yield Finding("Docker", "note", error, JOIN if "permission" in error.lower() else START)
        return
    _, missing = _asked(program, "compose", "version")
    if missing:
        yield Finding("Docker", "note", "docker compose is missing", "install Docker's compose plugin")
    elif gpu and "nvidia" not in version:
        yield Finding("Docker", "note", "it does not hand out the GPU", "install NVIDIA's container toolkit")
    else:
        yield Finding("Docker", "ok", f"engine {version.split()[0]}, with compose")


def _asked(*words: str) -> tuple[str, str]:
    """What a command says, and in one line why it failed; that is empty where it did not."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)  # nosec B603
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words[1:3])} does not answer"
    if answer.returncode == 0 and answer.stdout.strip():
        return answer.stdout.strip(), ""
    return "", (answer.stderr.strip().splitlines() or ["no answer"])[-1]


def look_at_port(port: int = UI_PORT) -> Iterator[Finding]:
    """Whether `make ui` can have its port."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what has just been closed is free
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            text = f"{port} is taken, perhaps by `make ui` itself"
            yield Finding("port", "note", text, f"make ui PORT={port + 1}")
            return
    yield Finding("port", "ok", f"{port} is free for make ui")


def look_at_mlflow(to: Destination) -> Iterator[Finding]:
    """Whether its database is whole and of this version, or its server answers; and what waits to be sent."""
    database = Path(to.uri.removeprefix(SQLITE).partition("?")[0]) if to.uri.startswith(SQLITE) else None
    damage = _damage(database) if database else ""
    if database and not database.exists():
        yield Finding("MLflow", "ok", f"{database.name} is made by the first stage")
    elif damage:
        text = f"{database} is damaged: {damage}"
        yield Finding("MLflow", "fix", text, f"mv {database} {database}.damaged; the next stage makes a new one")
    else:
        yield _answer(to)
    waiting = sum(spool.waiting() for spool in spools(to.folder))
    if waiting:
        yield Finding("MLflow", "note", f"{waiting} entries wait to be delivered", "make sync-tracking")


def _answer(to: Destination) -> Finding:
    name = masked(to.uri)
    try:
        to.folder.mkdir(parents=True, exist_ok=True)
        Store.connect(to.uri, to.folder / STORE_LOCK)
    except Unavailable as error:
        if "schema" in str(error):
            return Finding("MLflow", "fix", f"{name} is of another version of MLflow", f"mlflow db upgrade '{name}'")
        text = f"{name} does not answer: {masked(str(error))}"
        return Finding(
            "MLflow", "note", text, "stages run all the same; make sync-tracking sends later what it has missed"
        )
    return Finding("MLflow", "ok", f"{name} answers")


def _damage(database: Path) -> str:
    """What SQLite finds wrong with a file; nothing where it is sound or not there."""
    if not database.exists():
        return ""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
            (found,) = opened.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if found == "ok" else found
