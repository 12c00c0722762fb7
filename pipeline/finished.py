"""The training state of a stage that has finished, kept until DVC has taken what it made.

DVC hashes and stores a stage's outputs after the stage has ended. Killed in between, it knows nothing of them, removes them and
runs the stage again: which then goes on from its last checkpoint, the end, instead of starting over.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.files import write_json
from pipeline.lock import is_held

MARK = "finished"


def leave(folder: Path, name: str, dvc_lock: Path) -> None:
    """Marks the state as no longer needed once DVC's lock file has something new to say of the stage.

    Without DVC nothing is awaited, and where the lock file has this very result already it will not change: then the state
    goes at once.
    """
    entry = _entry(dvc_lock, name)
    if "DVC_STAGE" in os.environ and not _has_result(entry):
        write_json(folder / MARK, {"stage": name, "dvc_lock": str(dvc_lock.absolute()), "entry": _hash(entry)})
    else:
        shutil.rmtree(folder)


def sweep(work: Path) -> None:
    """Removes the states of finished stages of which DVC has taken the outputs, or whose checkout is gone."""
    for mark in work.glob(f"*/*/{MARK}"):
        told = json.loads(mark.read_text(encoding="utf-8"))
        dvc_lock = Path(told["dvc_lock"])
        gone = not dvc_lock.parent.exists()
        if (gone or _hash(_entry(dvc_lock, told["stage"])) != told["entry"]) and not is_held(mark.parent):
            shutil.rmtree(mark.parent)


def _entry(dvc_lock: Path, name: str) -> dict[str, Any]:
    """What DVC has noted of the stage's last run."""
    if not dvc_lock.exists():
        return {}
    return YAML(typ="safe").load(dvc_lock.read_text(encoding="utf-8"))["stages"].get(name, {})


def _has_result(entry: dict[str, Any]) -> bool:
    """Whether the stage's small output files, its metrics and curves, are just those that the entry has."""
    noted = {out["path"]: out["md5"] for out in entry.get("outs", []) if not out["md5"].endswith(".dir")}
    return bool(noted) and all(Path(path).is_file() and _md5(Path(path)) == md5 for path, md5 in noted.items())


def _md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()  # DVC's own choice


def _hash(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
