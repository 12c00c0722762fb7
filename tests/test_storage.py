"""Full disks and folders that cannot be written to: a sentence with the path and the space, and the file before stays."""

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline.backbone import Backbone
from pipeline.errors import StorageError, TrainingError
from pipeline.files import write_bytes, write_json, write_tsv
from pipeline.heads import ScalarHead
from pipeline.weights import HEAD, save_head


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system itself refuses more, in the middle of a write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS: dict[str, Callable[[Path], None]] = {
    "json": lambda file: write_json(file, {"new": "x" * 20_000}),
    "tsv": lambda file: write_tsv(file, [{"new": "x" * 20_000}]),
    "bytes": lambda file: write_bytes(file, bytes(20_000)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with (
        files_of_at_most(10_000),
        pytest.raises(StorageError, match=r"file cannot be written: .*; .*file needs 0\.02 MB"),
    ):
        WRITERS[kind](file)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_room_is_looked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000))
    with pytest.raises(StorageError, match=r"new/file needs 1 MB and its disk has 2 MB free; free some, and run"):
        write_bytes(tmp_path / "new" / "file", bytes(1_000_000))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file in the way")
    with pytest.raises(StorageError, match=r"artifacts/policy/head.safetensors cannot be written: Not a directory"):
        save_head(ScalarHead(8, std=0.1), tmp_path / "artifacts" / "policy")


def test_an_artifact_that_is_not_finite_leaves_the_one_before(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    """Report MakazhanAlpamys/Soup#532: NaN was saved with exit code 0."""
    backbone, head = make_backbone(), ScalarHead(8, std=0.1)
    backbone.save_adapter("sft", tmp_path)
    save_head(head, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert HEAD in before and len(before) == 4
    with torch.no_grad():
        backbone.adapter_parameters("sft")[0][0, 0] = float("nan")
        head.linear.bias.fill_(float("inf"))
    with pytest.raises(TrainingError, match="sft is not saved: 1 of its tensors hold NaN or infinity"):
        backbone.save_adapter("sft", tmp_path)
    with pytest.raises(TrainingError, match=r"head is not saved: .* the first is linear\.bias"):
        save_head(head, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
