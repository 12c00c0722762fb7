"""A tiny random model with a byte-level tokenizer, made on the spot: for the smoke recipe and the tests.

It learns nothing worth reading, but it goes through every line that a 7B model goes through, in seconds.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {"gpt2": {"n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4}}


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, and ChatML's special tokens; pad == eos, as in many real tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # nosec B106  # tokens of text
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(family: str = "llama", vocab_size: int = 320, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random float32 causal model of two layers; `family` is a model type of transformers."""
    shape = SHAPES.get(family, LLAMA_SHAPE) | {"vocab_size": vocab_size}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # nosec B105  # numbers of tokens
    config: PretrainedConfig = AutoConfig.for_model(family, **(shape | special | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Wider than usual: a random model of the usual spread predicts all tokens alike, and tests would see nothing.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "embed" not in name and "wte" not in name:
                    parameter.mul_(5)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2, bos_token_id=1)
    return model


def write_tiny_model(folder: Path, family: str = "llama", **overrides) -> None:
    """`tiny_model` and `tiny_tokenizer` as a model folder."""
    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
