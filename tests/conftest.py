"""Sets the environment that the pipeline wants before anything imports torch; tiny models and backbones for all tests."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.backbone import Backbone, BaseIdentity
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.tokenization import ChatTokenizer
from pipeline.loading import load_backbone
from pipeline.params.base import BaseParams, LoraParams
from pipeline.params.runtime import RuntimeParams
from pipeline.tiny import write_tiny_model

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
# a shell lets what it starts in the background ignore Ctrl-C, and stages keep to that; the tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("CI", None)  # there stages are quiet, and tests read what they print
LORA = LoraParams(r=4, alpha=8.0, dropout=0.0, targets="all-linear")


def runtime(**changes) -> RuntimeParams:
    """Runtime parameters as in the smoke recipe, with changes."""
    settings = {
        "device": "cpu",
        "launch": "single",
        "processes": 2,
        "threads": 2,
        "deterministic": True,
        "attention": "auto",
        "base_cache": "auto",
        "microbatch_tokens": 256,
        "rollout_chunk": 64,
        "decoder": "auto",
        "cuda_graphs": False,
        "logprob_chunk": 64,
        "check_memory": True,
        "gradient_checkpointing": False,
        "compile": "off",
        "packing": False,
        "checkpoint_steps": 100,
        "checkpoint_minutes": 5.0,
        "progress": "auto",
        "log_every": 1,
        "samples_every": 1,
        "tracking_uri": "sqlite:///mlflow.db",
        "tracking_wait": 20,
        "experiment": "tests",
    }
    return RuntimeParams(**(settings | changes))


def base_params(**changes) -> BaseParams:
    """A float32 base without quantisation, with changes."""
    settings = {"model": "tiny", "quantization": "none", "dtype": "float32", "trust_remote_code": False}
    return BaseParams(**(settings | changes))


@pytest.fixture(autouse=True)
def _two_threads_and_a_seed() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny models, made once per session."""
    made: dict[tuple, Path] = {}

    def folder(family: str = "llama", **overrides) -> Path:
        key = (family, *sorted(overrides.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            write_tiny_model(made[key], family, **overrides)
        return made[key]

    return folder


@pytest.fixture
def tokenizer(tiny_folders: Callable[..., Path]) -> ChatTokenizer:
    """The tiny models' byte-level tokenizer."""
    return load_tokenizer(tiny_folders(), max_prompt=64, max_response=24)


@pytest.fixture
def make_backbone(tiny_folders: Callable[..., Path]) -> Callable[..., Backbone]:
    """Backbones on tiny models: make_backbone(family, quantization=..., adapters=(...), runtime keys)."""

    def make(
        family: str = "llama",
        adapters: tuple[str, ...] = ("sft",),
        perturb: bool = True,
        quantization: str = "none",
        dtype: str = "float32",
        overrides: dict | None = None,
        lora: LoraParams = LORA,
        **runtime_changes,
    ) -> Backbone:
        folder = tiny_folders(family, **(overrides or {}))
        return backbone_in(folder, adapters, perturb, quantization, dtype, lora, **runtime_changes)

    return make


def backbone_in(
    folder: Path,
    adapters: tuple[str, ...] = ("sft",),
    perturb: bool = True,
    quantization: str = "none",
    dtype: str = "float32",
    lora: LoraParams = LORA,
    **runtime_changes,
) -> Backbone:
    """A backbone on a tiny model's folder."""
    torch.manual_seed(0)
    params = base_params(quantization=quantization, dtype=dtype)
    backbone = load_backbone(folder, params, runtime(**runtime_changes), BaseIdentity("f" * 64, 259, "tiny"))
    for name in adapters:
        backbone.add_adapter(name, lora)
        if perturb:  # a fresh adapter changes nothing, and tests of it would see nothing
            with torch.no_grad():
                for parameter in backbone.adapter_parameters(name):
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    return backbone
