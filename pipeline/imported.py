"""A person's own adapter or reward model in the place of one that a stage would train: `sft.from`, `reward.from`, `judge.from`.

docs/own_models.md says what can stand there.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.backbone import Backbone
from pipeline.base_model import locate_own
from pipeline.errors import BaseModelError
from pipeline.heads import ScalarHead
from pipeline.roles import RewardModel
from pipeline.weights import CONFIG, HEAD, ORIGIN, WEIGHTS, load_head, read_json, read_tensors

UNKNOWN = (
    ("use_dora", "DoRA"),
    ("lora_bias", "a LoRA bias"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "BD-LoRA"),
    ("alora_invocation_tokens", "aLoRA"),
    ("arrow_config", "Arrow"),
    ("layer_replication", "replicated layers"),
    ("trainable_token_indices", "trained token embeddings"),
    ("target_parameters", "adapted parameters that are no linear layers"),
)
"""Settings of PEFT's that change what a LoRA layer computes in ways that pipeline/lora.py does not follow."""
HEADS = ("score", "classifier")  # what models for sequence classification call theirs


def import_adapter(backbone: Backbone, name: str, key: str, spec: str) -> dict[str, Tensor]:
    """Loads the adapter that the parameter `key` names, as adapter `name`; the tensors of its file that are no LoRA.

    Raises:
        BaseModelError: it was trained on another base, has other shapes, or computes what this project does not.
    """
    folder = locate_own(key, spec)
    settings = read_json(folder / CONFIG)
    if (folder / ORIGIN).is_file():
        backbone.check_origin(folder)
    _check_kind(key, spec, settings)
    tensors = read_tensors(folder / WEIGHTS)
    lora = {name: tensor for name, tensor in tensors.items() if ".lora_A." in name or ".lora_B." in name}
    others = {name: tensor for name, tensor in tensors.items() if name not in lora}
    backbone.fill_adapter(name, folder, settings | {"modules_to_save": None, "task_type": "CAUSAL_LM"}, lora)
    return others


def import_sft(backbone: Backbone, spec: str) -> None:
    """Loads `sft.from` as the adapter `sft`.

    Raises:
        BaseModelError: see `import_adapter`, or it comes with more than an adapter.
    """
    others = import_adapter(backbone, "sft", "sft.from", spec)
    if others:
        raise BaseModelError(
            f"sft.from is {spec!r} but beside its adapter it has trained {', '.join(sorted(others))[:200]}; "
            "an SFT model here is a LoRA adapter alone."
        )


def import_reward_model(backbone: Backbone, name: str, spec: str) -> RewardModel:
    """Loads a PEFT folder with a scalar head, this project's (`head.safetensors`) or transformers' (`score.weight`).

    Raises:
        BaseModelError: see `import_adapter`, or there is no scalar head.
    """
    key = f"{name}.from"
    others = import_adapter(backbone, name, key, spec)
    folder = locate_own(key, spec)
    if (folder / HEAD).is_file():
        return RewardModel(backbone, name, load_head(folder, backbone.hidden_size, backbone.device))
    return RewardModel(backbone, name, _head_among(others, key, spec, backbone))


def _head_among(others: dict[str, Tensor], key: str, spec: str, backbone: Backbone) -> ScalarHead:
    by_end = {name.removeprefix("base_model.model."): tensor for name, tensor in others.items()}
    found = [name for name in HEADS if f"{name}.weight" in by_end]
    if not found or len(by_end) != 1 + (f"{found[0]}.bias" in by_end):
        raise BaseModelError(
            f"{key} is {spec!r} but beside its adapter it has {', '.join(sorted(by_end)) or 'nothing'}; a reward model needs "
            f"{HEAD} or score.weight, and no more."
        )
    weight = by_end[f"{found[0]}.weight"]
    if weight.shape != (1, backbone.hidden_size):
        raise BaseModelError(
            f"{key} is {spec!r} but its head is {tuple(weight.shape)}; for this base a scalar head is (1, {backbone.hidden_size})."
        )
    head = ScalarHead(backbone.hidden_size, std=0.0)
    with torch.no_grad():
        head.linear.weight.copy_(weight)
        head.linear.bias.copy_(by_end.get(f"{found[0]}.bias", torch.zeros(1)))
    return head.requires_grad_(False).to(backbone.device)


def _check_kind(key: str, spec: str, settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise BaseModelError(f"{key} is {spec!r}, of PEFT's kind {settings.get('peft_type')}; only LORA is known here.")
    unknown = [words for setting, words in UNKNOWN if settings.get(setting)]
    if settings.get("bias", "none") != "none":
        unknown.append("trained biases of the base")
    if unknown:
        raise BaseModelError(
            f"{key} is {spec!r}, which uses {', '.join(unknown)}; adapters here are plain LoRA: train one without."
        )
