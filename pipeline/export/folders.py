"""Folders that are exported whole or not at all."""

import os
import shutil
from pathlib import Path

from pipeline.files import PARTIAL, sync_folder

OLD = ".old"  # the end of the name of a folder that is being replaced


def begin(folder: Path) -> Path:
    """An empty folder beside `folder`, to be written, checked, and put in its place by `publish`."""
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Puts a folder of `begin` where it belongs: whoever reads sees the old one or the new one, never a mixture."""
    for file in partial.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors' own are for their owner alone
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    old = folder.with_name(folder.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
