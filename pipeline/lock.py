"""One process at a time in a folder, also after a crash: the system frees the lock of a process that is gone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.errors import UserError

LOCK, PID = "lock", "pid"


@contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder's lock.

    what: who runs, for the sentence that the second one gets.

    Raises:
        UserError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{what} is running already, as process {_pid(folder)}; wait for its end, or stop it with `kill {_pid(folder)}`."
        ) from None
    try:
        (folder / PID).write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Whether a living process holds the folder's lock."""
    lock = FileLock(folder / LOCK)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


def _pid(folder: Path) -> str:
    try:
        return (folder / PID).read_text(encoding="utf-8")
    except FileNotFoundError:  # it has the lock but has not written yet
        return "?"
