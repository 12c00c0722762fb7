"""A base's configuration without its weights: of a folder, of what is in the hub's cache, or of a table. Nothing is downloaded."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig

from pipeline.base_model import public_name
from pipeline.errors import BaseModelError
from pipeline.tiny import LLAMA_SHAPE

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
    name, revision = (EMBEDDED, None) if model == "embedded" else public_name(model)
    folder = Path(model).expanduser()
    if model.startswith("hf://"):
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
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
