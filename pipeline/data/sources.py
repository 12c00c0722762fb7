"""What a data parameter names: a file, a folder of files, or a data set of the Hugging Face hub at a pinned revision."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
POINTER = ".hf"  # a text file of one line, hf://org/name@revision:split; DVC can follow a file but no hf:// address
HUB_NAME = re.compile(r"hf://(?P<repository>\w[\w.-]*/\w[\w.-]*)@(?P<revision>[^@:\s]+):(?P<split>\S+)")


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
    try:
        place = Path(path).expanduser()
        if place.is_dir():
            return _files_in(key, place)
        if not place.is_file():
            raise DataError(
                f"{key} is {path!r} but there is no such file or folder; relative paths start at the project's root."
            )
        if place.suffix == POINTER:
            name = place.read_text(encoding="utf-8", errors="replace").strip()
            return [_hub_data(f"{key} is {path!r}, whose line", name)]
    except (OSError, RuntimeError) as error:  # not permitted, a name too long, no such user
        raise DataError(f"{key} is {path[:200]!r}, which cannot be opened: {_in_words(error)}") from error
    if not _is_data(Path(place.name)):
        raise DataError(f"{key} is {path!r} but only files ending in {', '.join((*SUFFIXES, POINTER))} can be read.")
    return [DataFile(place, _printable(Path(place.name)))]


def other_files(path: str) -> list[str]:
    """What `find_data` passes over in a folder, hidden files left out; folders that are linked to are among it."""
    place = Path(path).expanduser()
    return sorted(map(_printable, (file for file in _walk(place) if not _is_data(file)))) if place.is_dir() else []


def _files_in(key: str, place: Path) -> list[DataFile]:
    files = sorted(file for file in _walk(place) if _is_data(file) or file.suffix == ".arrow")
    if any(file.suffix == ".arrow" for file in files):
        raise DataError(
            f"{key} is {str(place)!r}, which holds .arrow files, as save_to_disk writes them; they are not read: export the data "
            "with to_parquet."
        )
    if not files:
        raise DataError(f"{key} is {str(place)!r} but that folder has no file ending in {', '.join(SUFFIXES)}.")
    for file in files:
        if not (place / file).is_file():
            raise DataError(
                f"{_printable(file)} in {str(place)!r} is no file, or a link to nothing; mend it or take it away."
            )
        if not (place / file).resolve().is_relative_to(place.resolve()):
            raise DataError(
                f"{_printable(file)} in {str(place)!r} is a link that leads out of that folder, and who made the folder need not "
                "be who owns what lies there; copy the file in its place (cp --dereference), or name the file itself."
            )
    return [DataFile(place / file, _printable(file)) for file in files]


def _walk(place: Path) -> Iterator[Path]:
    """Everything in a folder and the folders in it but what is hidden, as it lies below `place`. Links to folders are not followed."""

    def stop(error: OSError) -> NoReturn:
        raise error

    for folder, folders, files in os.walk(place, onerror=stop):
        below = Path(folder).relative_to(place)
        folders[:] = [name for name in folders if not _is_hidden(Path(name))]
        linked = (below / name for name in folders if (Path(folder) / name).is_symlink())
        yield from (link / "(a link to a folder)" for link in linked)
        yield from (below / name for name in files if not _is_hidden(Path(name)))


def _printable(file: Path) -> str:
    """A name for messages and lists, in which bytes that are no text become question marks."""
    return file.as_posix().encode(errors="replace").decode()


def _in_words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


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
