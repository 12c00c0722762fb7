"""A training state as a folder: tensors in safetensors, the rest in JSON, and a manifest by which damage is seen.

    step-000012/state.safetensors   every tensor
    step-000012/state.json          everything else; where a tensor belongs stands its name
    step-000012/manifest.json       format, number, place, the state's parts, size and SHA-256 of each file

It is written beside its place and renamed when all of it is on the disk: a folder of this name is whole, or was damaged later.
Nothing is unpickled.
"""

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pipeline.errors import UserError
from pipeline.files import PARTIAL, storage, sync_folder, write_bytes
from pipeline.weights import refuse_non_finite

FORMAT = 1
TENSORS, REST, MANIFEST = "state.safetensors", "state.json", "manifest.json"
TENSOR_KEY = "tensor"  # {"tensor": name} stands in the JSON where a tensor belongs
KEPT = 2

State = dict[str, Any]
"""Part -> dicts and lists of tensors and of what JSON can hold."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, or that lacks a part."""


@dataclass(frozen=True)
class Checkpoint:
    """A training state at one place of a loop.

    number: how many places lie before it.
    place: for people, such as `step 12`.
    made_under: versions and settings that may change the last bits of what follows.
    """

    number: int
    place: str
    made_under: dict[str, str]
    state: State


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Adds a checkpoint to a folder of checkpoints and removes all but the last two; where it lies.

    Raises:
        TrainingError: a number of the state is not finite; nothing is written.
        StorageError: there is no room, or the folder cannot be written to; the checkpoints that were there stay.
    """
    tensors: dict[str, Tensor] = {}
    rest = _without_tensors(checkpoint.state, "", tensors)
    refuse_non_finite(f"the checkpoint of {checkpoint.place}", tensors)
    files = {TENSORS: save(tensors), REST: json.dumps(rest, allow_nan=False).encode()}
    place = folder / f"step-{checkpoint.number:06d}"
    partial = place.with_name(place.name + PARTIAL)
    with storage(place, sum(map(len, files.values()))):
        partial.mkdir(parents=True)
        for name, content in files.items():
            write_bytes(partial / name, content)
        manifest = _manifest(checkpoint, files)
        sealed = {"manifest": manifest, "sha256": _hash_json(manifest)}
        write_bytes(partial / MANIFEST, json.dumps(sealed, indent=2).encode())
        sync_folder(partial)
        partial.rename(place)
        sync_folder(folder)
    for old in numbered(folder)[KEPT:]:
        shutil.rmtree(old)
    return place


def read_checkpoint(place: Path, parts: Collection[str]) -> Checkpoint:
    """A checkpoint that has just these parts.

    Raises:
        CheckpointError: a file is missing or is not what was written, or a part is missing or unknown.
    """
    try:
        sealed = json.loads((place / MANIFEST).read_bytes())
        manifest = sealed["manifest"]
        if _hash_json(manifest) != sealed["sha256"]:
            raise CheckpointError(f"{place / MANIFEST} has other bytes than were written.")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{place} has format {manifest['format']}, not {FORMAT}.")
        files = {name: _read(place / name, **written) for name, written in manifest["files"].items()}
        lacking, unknown = (", ".join(sorted(names)) for names in _difference(parts, manifest["parts"]))
        if lacking or unknown:
            raise CheckpointError(
                f"{place} lacks {lacking or 'nothing'} and has {unknown or 'nothing'} beside what it must."
            )
        state = _with_tensors(json.loads(files[REST]), load(files[TENSORS]))
        if set(state) != set(manifest["parts"]):
            raise CheckpointError(f"{place / REST} has other parts than {place / MANIFEST} says.")
        return Checkpoint(manifest["number"], manifest["place"], manifest["made_under"], state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{place} is damaged ({type(error).__name__}: {error}).") from error


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    return sorted((place for place in folder.glob("step-*") if not place.name.endswith(PARTIAL)), reverse=True)


def remove_partial(folder: Path) -> None:
    """Removes what a crash left half written."""
    for partial in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(partial)


def _manifest(checkpoint: Checkpoint, files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "number": checkpoint.number,
        "place": checkpoint.place,
        "made_under": checkpoint.made_under,
        "parts": sorted(checkpoint.state),
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }


def _hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(file: Path, size: int, sha256: str) -> bytes:
    content = file.read_bytes()
    if len(content) != size:
        raise CheckpointError(f"{file} has {len(content)} bytes, not the {size} that were written.")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{file} has other bytes than were written.")
    return content


def _difference(wanted: Collection[str], found: Collection[str]) -> tuple[set[str], set[str]]:
    return set(wanted) - set(found), set(found) - set(wanted)


def _without_tensors(content: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The content with names in the place of its tensors, which are put into `tensors`."""
    if isinstance(content, Tensor):
        # a copy: two names may stand for one memory, which safetensors refuses
        tensors[name] = content.detach().cpu().clone().contiguous()
        return {TENSOR_KEY: name}
    if isinstance(content, dict):
        return {key: _without_tensors(value, f"{name}/{key}", tensors) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_tensors(value, f"{name}/{place}", tensors) for place, value in enumerate(content)]
    return content


def _with_tensors(content: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(content, dict):
        if content.keys() == {TENSOR_KEY}:
            return tensors[content[TENSOR_KEY]]
        return {key: _with_tensors(value, tensors) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_tensors(value, tensors) for value in content]
    return content
