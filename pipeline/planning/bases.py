"""What is known of a model without its weights: of a folder, of what is in the hub's cache, or of a table. Nothing is downloaded."""

import math
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from pipeline.base_model import public_name
from pipeline.errors import BaseModelError
from pipeline.tiny import LLAMA_SHAPE
from pipeline.weights import CONFIG as ADAPTER

EMBEDDED = "SmolLM2-135M"
TIED = {"tie_word_embeddings": True}

# name -> family, hidden size, inner size, layers, heads, key-value heads, vocabulary, what else; from the models' config.json
KNOWN = {
    "SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 49152, TIED),
    "SmolLM2-360M": ("llama", 960, 2560, 32, 15, 5, 49152, TIED),
    "SmolLM2-1.7B": ("llama", 2048, 8192, 24, 32, 32, 49152, TIED),
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, TIED),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, TIED),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, TIED),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, {}),
    "Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 128256, TIED),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, {}),
    "Mistral-7B-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 32768, {"sliding_window": None}),
}


def configuration(model: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """What `base.model`, or a name of the table, has for a configuration.

    Raises:
        BaseModelError: its configuration is not on this machine, and the table does not have it.
    """
    if model == "tiny":
        return AutoConfig.for_model("llama", vocab_size=320, **LLAMA_SHAPE)
    name = EMBEDDED if model == "embedded" else public_name(model)[0]
    folder = _folder(model)
    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)  # nosec B615  # a local folder
    short = name.rpartition("/")[2].removesuffix("-Instruct").replace("Mistral-7B-Instruct", "Mistral-7B")
    if short not in KNOWN:
        raise BaseModelError(
            f"The configuration of {model!r} is not on this machine; give a folder with its config.json, or one of {', '.join(KNOWN)}."
        )
    family, hidden, inner, layers, heads, kv_heads, vocabulary, more = KNOWN[short]
    return AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        **more,
    )


def whole_model_size(spec: str, dtype: torch.dtype) -> int:
    """Bytes of a model of the person's own in this precision; 0 for an adapter, and where it is not on this machine yet."""
    folder = _folder(spec)
    if (folder / ADAPTER).is_file():
        return 0
    elements = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            elements += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118  # no dict
    return elements * dtype.itemsize


def _folder(spec: str) -> Path:
    """Where it lies; of the hub's models, in the hub's cache, if it is there."""
    if spec.startswith("hf://"):
        name, revision = public_name(spec)
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
    return Path(spec).expanduser()
