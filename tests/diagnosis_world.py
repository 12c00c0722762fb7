"""A folder as `dvc repro` leaves it before stage `ppo`, made of a tiny random model in a second: for `make diagnose`."""

import json
import shutil
from pathlib import Path

import torch
from conftest import LORA, ROOT, base_params, runtime
from ruamel.yaml import YAML

from pipeline.backbone import BaseIdentity
from pipeline.base_model import fingerprint
from pipeline.data.prepared import write_records
from pipeline.data.records import Message, Pair, PromptOnly, as_demonstration
from pipeline.diagnosis.opening import Case, open_case
from pipeline.heads import ScalarHead
from pipeline.loading import load_backbone
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.stage import Stage
from pipeline.tracking.tracker import Tracker
from pipeline.weights import save_head

WORDS = ["sun", "rain", "tea", "bread", "ink", "salt", "wool", "iron", "milk", "corn"]


def write_world(folder: Path, base: Path, **changes: object) -> None:
    """params.yaml (the smoke recipe, `changes` at dotted keys with __ for the dot), prepared parts and artifacts."""
    content = YAML(typ="safe").load((ROOT / "recipes" / "smoke.yaml").read_text(encoding="utf-8"))
    content["base"] |= {"model": str(base), "quantization": "none"}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section][name] = value
    YAML().dump(content, folder / "params.yaml")
    prepared = folder / "prepared"
    prepared.mkdir(parents=True)
    identity = BaseIdentity(fingerprint(base), 259, base.name)
    (prepared / "base.json").write_text(json.dumps({"fingerprint": identity.fingerprint}))
    asked = [
        (Message("user", f"What is {word}{'?' * (place % 3)} " * (1 + place % 2)),)
        for place, word in enumerate(WORDS * 3)
    ]
    asked = [(Message("user", f"{number} {turn.content}"),) for number, (turn,) in enumerate(asked)]
    write_records(prepared / "ppo.jsonl", [PromptOnly(prompt) for prompt in asked[:16]])
    pairs = [Pair(prompt, f"It is {WORDS[n % 10]} of old", f"no idea {n}") for n, prompt in enumerate(asked[16:])]
    write_records(prepared / "development.jsonl", pairs)
    write_records(prepared / "sft.jsonl", map(as_demonstration, pairs))
    torch.manual_seed(0)
    backbone = load_backbone(base, base_params(), runtime(), identity)
    for name in ("sft", "reward"):
        backbone.add_adapter(name, LORA)
        with torch.no_grad():
            for parameter in backbone.adapter_parameters(name):
                parameter.add_(torch.randn_like(parameter) * 0.05)
        backbone.save_adapter(name, folder / "artifacts" / name)
    save_head(ScalarHead(backbone.hidden_size, std=0.1), folder / "artifacts" / "reward")


def open_world() -> Case:
    """The case of the folder that is the working directory."""
    return open_case(Stage("ppo", 5, load_section("runtime", RuntimeParams), Tracker()))


def copied(world: Path, folder: Path) -> Path:
    """A world that may be changed."""
    shutil.copytree(world, folder, dirs_exist_ok=True)
    return folder
