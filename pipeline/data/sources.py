"""What a data parameter names: a file, a folder of files, or a data set of the Hugging Face hub at a pinned revision."""

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
POINTER = ".hf"  # a text file of one line, hf://org/name@revision:split; DVC can follow a file but no hf:// address
HUB_NAME = re.compile(r"hf://(?P<repository>[^/@:\s]+/[^/@:\s]+)@(?P<revision>[^@:\s]+):(?P<split>\S+)")


@dataclass(frozen=True)
class DataFile:
    """A file, and its name in messages: relative to the folder that was named."""

    path: Path
    name: str


@dataclass(frozen=True)
class HubData:
    """A split of a data set on the hub."""

    repository: str
    revision: str
    split: str

    @property
    def name(self) -> str:
        """How it is written, and its name in messages."""
        return f"hf://{self.repository}@{self.revision}:{self.split}"


def find_data(key: str, path: str) -> list[DataFile | HubData]:
    """What `path` names, files in name order. `key` is the parameter that holds the path, for messages.

    Raises:
        DataError: there is nothing there, nothing that can be read, or a hub name without revision or split.
    """
    if path.startswith("hf://"):
        return [_hub_data(key, path)]
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if _is_data(file.relative_to(place)) and file.is_file())
        if not files:
            raise DataError(f"{key} is {path!r} but that folder has no file ending in {', '.join(SUFFIXES)}.")
        return [DataFile(file, file.relative_to(place).as_posix()) for file in files]
    if not place.is_file():
        raise DataError(
            f"{key} is {path!r} but there is no such file or folder; relative paths start at the project's root."
        )
    if place.suffix == POINTER:
        return [
            _hub_data(f"{key} is {path!r}, whose line", place.read_text(encoding="utf-8", errors="replace").strip())
        ]
    if not _is_data(Path(place.name)):
        raise DataError(f"{key} is {path!r} but only files ending in {', '.join((*SUFFIXES, POINTER))} can be read.")
    return [DataFile(place, place.name)]


def other_files(path: str) -> list[str]:
    """The files of a folder that `find_data` passes over, hidden ones left out."""
    place = Path(path).expanduser()
    files = (file.relative_to(place) for file in place.rglob("*") if file.is_file()) if place.is_dir() else ()
    return sorted(file.as_posix() for file in files if not _is_data(file) and not _is_hidden(file))


def _is_data(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES) and not _is_hidden(file)


def _is_hidden(file: Path) -> bool:
    """Caches and version control lie in hidden folders."""
    return any(part.startswith(".") for part in file.parts)


def _hub_data(key: str, name: str) -> HubData:
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise DataError(
            f"{key} is {name!r} but a hub data set must be written hf://org/name@revision:split, with the revision pinned, "
            "so that the same words always mean the same rows; take the commit hash from the data set's history page."
        )
    return HubData(**found.groupdict())
