"""What a run is made of: the stage's definition in its DVC file, hashes, code version, hardware."""

import hashlib
import json
import platform
import re
import subprocess  # nosec B404  # git alone is called
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from ruamel.yaml import YAML

from pipeline.errors import UserError
from pipeline.files import hash_path
from pipeline.params.section import read_params

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")  # that numbers depend on
COMMIT = re.compile(r"@[0-9a-f]{40}\b")
TEMPLATE = re.compile(r"\$\{([\w.]+)\}")  # how dvc.yaml refers to params.yaml
# The second holds what `dvc repro` alone is not to pay for. Its stages run in the root too: they say `wdir: ..`.
DVC_FILES = (Path("dvc.yaml"), Path("alternatives/dvc.yaml"))


def versions() -> dict[str, str]:
    """Of the packages that numbers depend on."""
    return {package: version(package) for package in PACKAGES}


def stage_definition(name: str) -> dict[str, list[str]]:
    """The stage's deps, outputs and parameter sections, as its DVC file has them."""
    stage = _stages(_dvc_file(name))[name]
    outputs = [_path_of(entry) for kind in ("outs", "metrics", "plots") for entry in stage.get(kind, [])]
    sections = [str(key).partition(".")[0] for key in stage.get("params", [])]
    params = dict(flattened(read_params()))
    deps = [TEMPLATE.sub(lambda found: params.get(found[1], found[0]), path) for path in stage.get("deps", [])]
    return {"deps": deps, "outs": outputs, "params": list(dict.fromkeys(sections))}


def stage_inputs(definition: dict[str, list[str]]) -> dict[str, str]:
    """The content hash of each dependency that is there, data and code alike."""
    return {path: hash_path(Path(path)) for path in definition["deps"] if Path(path).exists()}


def state_key(name: str, inputs: dict[str, str]) -> str:
    """What a stage's training state is a function of: its tracked parameters, its inputs, its code.

    With any of them changed no old state is found. `runtime` is no part of it, nor are modules that cannot change a result.
    """
    tracked = [str(key) for key in _stages(_dvc_file(name))[name].get("params", [])]
    params = read_params()
    return digest(name, {key: _value_at(params, key) for key in tracked}, inputs)[:16]


def _value_at(content: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def stage_address(name: str) -> str:
    """What `dvc repro` calls the stage, from the root."""
    file = _dvc_file(name)
    return name if file == DVC_FILES[0] else f"{file}:{name}"


def dvc_lock(name: str) -> Path:
    """Where DVC notes what the stage's last run was made of and has made."""
    return _dvc_file(name).with_suffix(".lock")


def _dvc_file(name: str) -> Path:
    known = {file: _stages(file) for file in DVC_FILES}
    for file, stages in known.items():
        if name in stages:
            return file
    places = "; ".join(f"{file} has {', '.join(stages)}" for file, stages in known.items())
    raise UserError(f"{name} is not a stage: {places}.")


def _stages(file: Path) -> dict[str, dict[str, Any]]:
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))["stages"]


def _path_of(entry: str | dict) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def digest(*parts: Any) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def unpinned(params: dict[str, Any]) -> list[str]:
    """The keys whose model or data set on the hub is named at a revision that can move: a branch or a tag, no commit.

    A hub data set may stand in a file that ends in .hf, of which a key gives the path.
    """
    moving = []
    for key, value in flattened(params):
        pointer = Path(value)
        spec = pointer.read_text(encoding="utf-8") if value.endswith(".hf") and pointer.is_file() else value
        if spec.startswith("hf://") and not COMMIT.search(spec):
            moving.append(key)
    return moving


def flattened(content: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested keys joined by dots, values as text."""
    rows = []
    for key, value in content.items():
        if isinstance(value, dict):
            rows += flattened(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows


def numbers(content: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The numbers among nested values, keys joined by dots."""
    rows = []
    for key, value in content.items():
        if isinstance(value, dict):
            rows += numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            rows.append((f"{prefix}{key}", float(value)))
    return rows


def git_tags() -> dict[str, str]:
    """The commit, and whether tracked files differ from it."""

    def ask(*words: str) -> str:
        # the words are ours and no shell reads them; git is the one that the user would call
        answer = subprocess.run(["git", *words], capture_output=True, text=True, check=False)  # nosec B603 B607
        return answer.stdout.strip() if answer.returncode == 0 else ""

    return {
        "git.commit": ask("rev-parse", "HEAD"),
        "git.dirty": str(bool(ask("status", "--porcelain", "--untracked-files=no"))).lower(),
    }


def parent_tags(params: dict[str, Any]) -> dict[str, str]:
    """What pipeline runs are filtered by."""
    return {
        "base.model": str(params["base"]["model"]),
        "data.pairs": str(params["data"]["pairs"]),
        "ppo.algorithm": str(params["ppo"]["algorithm"]),
        "seed": str(params["seed"]),
        **git_tags(),
    }


def hardware() -> str:
    """The GPU, or the CPU with its number and the memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 1024**3
    return f"{models[0] if models else platform.machine()}, {psutil.cpu_count()} CPUs, {memory:.0f} GB"


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
