"""Adapters and heads as files: PEFT's own format, safetensors only, the same weights giving the same bytes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.errors import BaseModelError, TrainingError
from pipeline.files import write_bytes
from pipeline.heads import ScalarHead

WEIGHTS, CONFIG, ORIGIN, HEAD = "adapter_model.safetensors", "adapter_config.json", "origin.json", "head.safetensors"


def save_head(head: ScalarHead, folder: Path) -> None:
    """The head beside its adapter.

    Raises:
        TrainingError, StorageError: see `save_tensors`; nothing is written.
    """
    save_tensors("head", dict(sorted(head.state_dict().items())), folder / HEAD)


def save_tensors(what: str, tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all.

    Raises:
        TrainingError: a number is not finite; nothing is written.
        StorageError: there is no room, or the folder cannot be written to.
    """
    refuse_non_finite(what, tensors)
    write_bytes(file, save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, metadata))


def load_head(folder: Path, hidden_size: int, device: torch.device) -> ScalarHead:
    """The head of `save_head`, frozen.

    Raises:
        BaseModelError: it is missing or has another size; a head is never made up.
    """
    tensors = read_tensors(folder / HEAD)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if shapes != {"linear.weight": (1, hidden_size), "linear.bias": (1,)}:
        raise BaseModelError(f"{folder / HEAD} holds {shapes}, not a scalar head for hidden size {hidden_size}.")
    head = ScalarHead(hidden_size, std=0.0)
    head.load_state_dict(tensors)
    return head.requires_grad_(False).to(device)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_non_finite(what: str, tensors: dict[str, Tensor]) -> None:
    """Before anything is written.

    Raises:
        TrainingError: a tensor holds NaN or infinity.
    """
    bad = [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise TrainingError(
            f"{what} is not saved: {len(bad)} of its tensors hold NaN or infinity, the first is {bad[0]}."
        )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """A safetensors file.

    Raises:
        BaseModelError: it is missing or damaged.
    """
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise BaseModelError(f"{file} is missing or damaged ({error}); run the stage that makes it again.") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BaseModelError: it is missing or damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{file} is missing or damaged ({error}); run the stage that makes it again.") from None
