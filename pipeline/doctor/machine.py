"""Python, its packages, and the disk."""

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from pipeline.doctor.findings import Finding
from pipeline.files import free_bytes

LOCKS = (Path("requirements.lock"), Path("requirements-model.lock"))
MAKE_AGAIN = "rm -r .venv && make setup"
SCARCE = 5 * 10**9  # bytes: some runs of a small base


def look_at_python(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Version and system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if version != (3, 11):
        yield Finding("Python", "fix", found, "install Python 3.11, for which the packages are locked; then make setup")
    elif sys.platform != "linux":
        yield Finding("Python", "note", found, "nothing but Linux has been tried: docs/containers.md")
    else:
        yield Finding("Python", "ok", found)


def look_at_packages(locks: tuple[Path, ...] = LOCKS) -> Iterator[Finding]:
    """Whether what is installed is what the lock files say."""
    lines = [line for lock in locks for line in lock.read_text(encoding="utf-8").splitlines()]
    locked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    others = list(filter(None, map(_otherwise, locked)))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield Finding("packages", "fix", f"not as locked: {', '.join(others[:3])}{more}", MAKE_AGAIN)
    else:
        yield Finding("packages", "ok", f"{len(locked)}, all as locked")


def _otherwise(locked: Requirement) -> str:
    """How a package differs from its lock, if it does. 2.13.0+cu130 is 2.13.0: what follows the plus says how it was built."""
    try:
        found = importlib.metadata.version(locked.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{locked.name} is missing"
    return "" if locked.specifier.contains(Version(found).public, prereleases=True) else f"{locked.name} {found}"


def look_at_disk(folders: Mapping[str, Path], scarce: int = SCARCE) -> Iterator[Finding]:
    """Whether the folders, which need not be there yet, can be written to, and have room.

    scarce: bytes; who has fewer should know.
    """
    for name, folder in folders.items():
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        try:
            with tempfile.TemporaryFile(dir=there):  # asking for rights would not see a read-only file system
                free = free_bytes(there / "file")
        except OSError as error:
            text = f"{name}: {there} cannot be written to: {error.strerror}"
            yield Finding("disk", "fix", text, f"sudo chown -R $(id -u) {there}, if it is a matter of rights")
            continue
        if free < scarce:
            remedy = "free some: docs/doctor.md says what takes room"
            yield Finding("disk", "note", f"{name}: {free / 1e9:.1f} GB free", remedy)
        else:
            yield Finding("disk", "ok", f"{name}: {free / 1e9:.0f} GB free")
