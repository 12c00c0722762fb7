"""A run's spool: what is to reach MLflow, on disk before anything is sent. Nothing of MLflow is known here.

    FOLDER/RUN.jsonl        one entry per line, appended, never changed
    FOLDER/RUN/             copies of the files and tables that entries name
    FOLDER/RUN.state.json   how far it is delivered; written by whoever holds
    FOLDER/RUN.lock         so that one process at a time delivers it

An entry is {"do": what, "at": milliseconds since 1970, ...}; pipeline/tracking/store.py says what each kind means.
"""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.masking import masked

Entry = dict[str, Any]
ENDS = ("FINISHED", "FAILED", "KILLED")
KEEP_SECONDS = 7 * 24 * 3600  # a delivered spool is kept that long: a run that was killed goes on from it


@dataclass(frozen=True)
class Delivered:
    """How far a spool has been delivered.

    offset: up to which byte every entry has arrived, or is held.
    run_id, parent_id: MLflow's names of the run and its parent, None before they exist there.
    held: where the entries begin that did not arrive alone, while others did.
    """

    offset: int = 0
    run_id: str | None = None
    parent_id: str | None = None
    held: tuple[int, ...] = ()


class Spool:
    """One run's entries. One process appends; one process at a time, not always the same, delivers."""

    def __init__(self, folder: Path, run: str):
        self.run = run
        self.file = folder / f"{run}.jsonl"
        self.files = folder / run
        self.lock = FileLock(folder / f"{run}.lock", thread_local=False)
        self._state = folder / f"{run}.state.json"

    def append(self, do: str, **content: Any) -> None:
        """Adds an entry; with secrets masked.

        Raises:
            OSError: it could not be written; nothing of it is left in the file.
        """
        entry = {"do": do, "at": time.time_ns() // 1_000_000, **content}
        text = masked(json.dumps(entry, ensure_ascii=False, allow_nan=False))
        line = text.encode(errors="replace") + b"\n"
        with self.file.open("ab", buffering=0) as stream:
            start = stream.tell()
            if stream.write(line) != len(line):
                stream.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.file))

    def keep_file(self, source: Path, name: str | None = None) -> str:
        """Copies a file into the spool, under its own name if no other is given; the name for an entry."""
        place = self.files / (name or source.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        return name or source.name

    def keep_json(self, name: str, content: Any) -> str:
        """Writes a JSON file into the spool; the name for an entry. Numbers that are not finite become null."""
        place = self.files / f"{name}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        text = masked(json.dumps(_finite(content), ensure_ascii=False))
        place.write_text(text, encoding="utf-8", errors="replace")
        return f"{name}.json"

    def sync(self) -> None:
        """Returns when the entries are safe from a loss of power."""
        with self.file.open("rb") as stream:
            os.fsync(stream.fileno())

    def read(self, offset: int = 0) -> Iterator[tuple[Entry, int]]:
        """The entries from a byte on, each with the byte after it. A line that is still being written is left out."""
        with self.file.open("rb") as stream:
            stream.seek(offset)
            while (line := stream.readline()).endswith(b"\n"):
                offset += len(line)
                yield json.loads(line), offset

    def repair(self) -> None:
        """Cuts off what a crash left half written. Only for a spool that no living process appends to."""
        good = 0
        try:
            for _, end in self.read():
                good = end
        except ValueError:
            pass  # from the first line that is no JSON on, nothing can be trusted
        if good < self.file.stat().st_size:
            os.truncate(self.file, good)

    @property
    def delivered(self) -> Delivered:
        """What the last delivery noted; from the start where that was lost, as delivering twice does no harm."""
        try:
            noted = json.loads(self._state.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return Delivered()
        return Delivered(**noted | {"held": tuple(noted["held"])})

    def note(self, delivered: Delivered) -> None:
        """Writes how far delivery has come, whole or not at all."""
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(delivered)), encoding="utf-8")
        partial.replace(self._state)

    def waiting(self) -> int:
        """Entries that have not arrived yet."""
        delivered = self.delivered
        with self.file.open("rb") as stream:
            stream.seek(delivered.offset)
            return len(delivered.held) + sum(line.endswith(b"\n") for line in stream)

    def end_if_dead(self) -> None:
        """Marks a run KILLED whose process is gone without having said how it ended."""
        last: Entry = {}
        status = None
        for last, _ in self.read():
            status = last["status"] if last["do"] == "status" else status
        if status not in ENDS:
            self.append("status", status="KILLED", ended=last.get("at"))

    def forget_if_old(self) -> None:
        """Removes a spool that is delivered and that no run has touched for a week."""
        if not self.waiting() and time.time() - self.file.stat().st_mtime > KEEP_SECONDS:
            shutil.rmtree(self.files, ignore_errors=True)
            for file in (self.file, self._state, Path(self.lock.lock_file)):
                file.unlink(missing_ok=True)


def spools(folder: Path) -> list[Spool]:
    """All spools of a folder, the oldest run first."""
    return [Spool(folder, file.stem) for file in sorted(folder.glob("*.jsonl"))]


def _finite(content: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(item) for item in content]
    return content
