"""Checkpoints on disk: exact, whole or not at all, and no damage goes unseen."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoint import (
    MANIFEST,
    REST,
    TENSORS,
    Checkpoint,
    CheckpointError,
    numbered,
    read_checkpoint,
    remove_partial,
    write_checkpoint,
)
from pipeline.errors import StorageError, TrainingError

SHARED = torch.arange(6.0)
STATE = {
    "optimizer": {"steps_taken": 3, "weights": {"adapter": [SHARED, SHARED[2:4]]}, "adam": {"0": {"step": torch.tensor(3.0)}}},
    "random": {"torch": torch.arange(5, dtype=torch.uint8), "python": (3, (1, 2**32 - 1), None)},
    "curves": [{"step": 0, "loss": 0.1 + 0.2, "name": "größer"}, {"step": 1, "loss": 1e-320}],
    "mask": torch.tensor([[True], [False]]),
    "bfloat": torch.tensor([1.0, 2**-9], dtype=torch.bfloat16),
}  # fmt: skip


def checkpoint(number: int, **changes: object) -> Checkpoint:
    return Checkpoint(number, f"step {number}", {"torch": "2"}, STATE | changes)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    found = read_checkpoint(write_checkpoint(tmp_path, checkpoint(3)), STATE)
    assert (found.number, found.place, found.made_under) == (3, "step 3", {"torch": "2"})
    first, second = found.state["optimizer"]["weights"]["adapter"]
    assert first.tolist() == [0, 1, 2, 3, 4, 5] and second.tolist() == [2, 3]
    assert found.state["optimizer"]["adam"]["0"]["step"] == torch.tensor(3.0)
    assert found.state["random"]["torch"].tolist() == [0, 1, 2, 3, 4]
    assert found.state["random"]["torch"].dtype == torch.uint8
    assert found.state["random"]["python"] == [3, [1, 4294967295], None]
    assert found.state["curves"] == [
        {"step": 0, "loss": 0.30000000000000004, "name": "größer"},
        {"step": 1, "loss": 1e-320},
    ]
    assert found.state["mask"].tolist() == [[True], [False]]
    assert found.state["bfloat"].tolist() == [1.0, 0.001953125] and found.state["bfloat"].dtype == torch.bfloat16


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10):
        write_checkpoint(tmp_path, checkpoint(number))
    assert [place.name for place in numbered(tmp_path)] == ["step-000010", "step-000009"]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["step-000009", "step-000010"]


def test_what_a_crash_left_half_written_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    place = write_checkpoint(tmp_path, checkpoint(1))
    half = tmp_path / "step-000002.partial"
    shutil.copytree(place, half)
    assert numbered(tmp_path) == [place]
    remove_partial(tmp_path)
    assert not half.exists() and place.exists()


def flip(file: Path) -> None:
    """One bit of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
}


@pytest.mark.parametrize("name", [TENSORS, REST, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_seen(tmp_path: Path, name: str, damage: str) -> None:
    place = write_checkpoint(tmp_path, checkpoint(1))
    DAMAGES[damage](place / name)
    with pytest.raises(CheckpointError, match="step-000001"):
        read_checkpoint(place, STATE)


def test_every_byte_of_every_file_counts(tmp_path: Path) -> None:
    """Whichever bit flips, what is read is what was written, or nothing is."""
    place = write_checkpoint(tmp_path, Checkpoint(1, "step 1", {}, {"a": {"b": torch.ones(2)}}))
    for name in (TENSORS, REST, MANIFEST):
        content = (place / name).read_bytes()
        for index in range(len(content)):
            (place / name).write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            try:
                found = read_checkpoint(place, ["a"])
            except CheckpointError:
                continue
            assert (found.number, found.place, found.made_under) == (1, "step 1", {})
            assert found.state["a"]["b"].tolist() == [1, 1]
        (place / name).write_bytes(content)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    """Report NVIDIA-NeMo/RL#3171: a checkpoint without the optimizer's state went on with a fresh one, and said nothing."""
    state = {name: part for name, part in STATE.items() if name != "optimizer"}
    place = write_checkpoint(tmp_path, Checkpoint(1, "step 1", {}, state))
    with pytest.raises(CheckpointError, match="lacks optimizer"):
        read_checkpoint(place, STATE)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_that_is_not_finite_is_written(tmp_path: Path, bad: float) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    with pytest.raises(
        TrainingError, match=r"checkpoint of step 2 is not saved: 1 of its tensors hold NaN or infinity"
    ):
        write_checkpoint(tmp_path, checkpoint(2, mask=torch.tensor([1.0, bad])))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(tmp_path, checkpoint(2, curves=[{"loss": bad}]))
    assert [place.name for place in tmp_path.iterdir()] == ["step-000001"]
    read_checkpoint(tmp_path / "step-000001", STATE)


def test_without_room_the_one_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(StorageError, match=r"step-000002 needs 8 MB and its disk has 1 MB free; free some"):
        write_checkpoint(tmp_path, checkpoint(2, mask=torch.zeros(2_000_000)))
    assert [place.name for place in tmp_path.iterdir()] == ["step-000001"]


def test_nothing_in_it_is_unpickled(tmp_path: Path) -> None:
    """A pickle in the place of the tensors is not opened, whatever the manifest says of it."""
    place = write_checkpoint(tmp_path, checkpoint(1))
    torch.save({"a": Tensor()}, place / TENSORS)
    manifest = json.loads((place / MANIFEST).read_text())["manifest"]
    content = (place / TENSORS).read_bytes()
    manifest["files"][TENSORS] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (place / MANIFEST).write_text(json.dumps({"manifest": manifest, "sha256": seal}))
    with pytest.raises(CheckpointError, match="SafetensorError"):
        read_checkpoint(place, STATE)
