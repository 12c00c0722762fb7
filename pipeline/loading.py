"""A base folder -> a Backbone: quantised, frozen, on its device."""

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from pipeline import attention as recompute
from pipeline import blocks
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.base_checks import check_output_head, check_packing
from pipeline.errors import BaseModelError
from pipeline.params.base import BaseParams
from pipeline.params.runtime import RuntimeParams
from pipeline.quantization import FrozenLinear4bit, check_shapes, fill_cache, replace_forwards

COMPILED_VARIANTS = 64
# glibc's mallopt(3): which blocks are mapped apart from the heap, and how much free memory at the heap's end is given back.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
EACH_TENSOR = 64 * 2**10  # bytes
GLIBC_AT_MOST = 32 * 2**20  # where glibc's own, rising threshold ends


def load_backbone(folder: Path, params: BaseParams, runtime: RuntimeParams, identity: BaseIdentity) -> Backbone:
    """The base in `folder` on the device that `runtime` names, frozen, quantised as `params` says, without adapters.

    Raises:
        BaseModelError: the folder cannot be loaded, or NF4 does not fit the model's shapes.
    """
    device = pick_device(runtime)
    dtype = getattr(torch, params.dtype)
    recompute.register()
    attention = attention_of(runtime, device)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=params.trust_remote_code)  # nosec B615  # a local folder
        without_dropout(config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=params.trust_remote_code)
        quantization = None
        if params.quantization == "nf4":
            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
                # FSDP divides numbers with a point only; the bytes are the same
                bnb_4bit_quant_storage=dtype if runtime.launch == "fsdp" else torch.uint8,
            )
            check_shapes(skeleton, skipped={output_head_name(skeleton)})
        with tensors_mapped_apart(), contextlib.ExitStack() as opened:
            causal = type(skeleton).from_pretrained(  # no name: nothing is looked up
                None,
                config=config,
                state_dict=unread_weights(folder, opened),
                dtype=dtype,
                quantization_config=quantization,
                attn_implementation=attention,
                device_map={"": device},
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BaseModelError(
            f"base.model {params.model!r} cannot be loaded from {folder}: {' '.join(str(error).split())[:300]}"
        ) from error
    return as_backbone(causal, dtype, runtime, identity, device)


def as_backbone(
    causal: PreTrainedModel, dtype: torch.dtype, runtime: RuntimeParams, identity: BaseIdentity, device: torch.device
) -> Backbone:
    """A model on its device, quantised or not, with our forwards, and with what `runtime` says of caches and compiled blocks.

    Raises:
        BaseModelError: the model does not fit its tokenizer or `runtime`.
    """
    blocks.replace_forwards(causal)
    layers = replace_forwards(causal, dtype)
    if identity.tokenizer_length > causal.get_input_embeddings().weight.shape[0]:
        raise BaseModelError(
            f"The tokenizer of base.model has {identity.tokenizer_length} tokens but the embedding table {causal.get_input_embeddings().weight.shape[0]} rows; "
            "a token was added without a row for it: use the tokenizer that came with the model."
        )
    if runtime.launch != "fsdp":  # which would hold the base whole in each process
        fill_cache(layers, runtime.base_cache, device)
        blocks.join_weights(causal)
    if runtime.compile == "layers":
        compile_layers(causal, layers)
    backbone = Backbone(
        causal, device, identity, runtime.gradient_checkpointing, runtime.packing, sharded=runtime.launch == "fsdp"
    )
    check_output_head(backbone)
    if runtime.packing:
        check_packing(backbone)
    return backbone


def unread_weights(folder: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """Slices of safetensors, each read into memory of its own when it is asked for; the files are open as long as `opened`.

    transformers maps the files instead, whose pages would then lie in memory beside the whole base.

    Raises:
        OSError: a file is not there.
        SafetensorError: it is damaged.
    """
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = {one.name} if one.exists() else set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [opened.enter_context(safe_open(folder / name, "pt", backend="pread")) for name in sorted(names)]
    return {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118  # no dict


@contextlib.contextmanager
def tensors_mapped_apart() -> Iterator[None]:
    """Within the block, memory of a tensor goes back to the system with it.

    Quantising a layer takes many times its bytes. glibc before 2.38 (its bug 14581) cannot use again what an aligned block
    leaves in the heap, so layer for layer memory would grow, up to the size of the whole base in float32.
    """
    if sys.platform != "linux":  # torch's builds for Linux run on glibc
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, EACH_TENSOR)
    try:
        yield
    finally:
        # passes are faster with a heap; once set by hand the thresholds do not rise by themselves
        mallopt(M_MMAP_THRESHOLD, GLIBC_AT_MOST)
        mallopt(M_TRIM_THRESHOLD, 2 * GLIBC_AT_MOST)


def attention_of(runtime: RuntimeParams, device: torch.device) -> str:
    """What `runtime.attention` means, in transformers' words."""
    if runtime.attention != "auto":
        return runtime.attention
    if device.type == "cuda":
        return "sdpa"
    return (
        "eager" if runtime.compile == "layers" else "recompute"
    )  # the compiler makes one kernel of eager's operations


def compile_layers(causal: PreTrainedModel, quantized: list[FrozenLinear4bit]) -> None:
    """Each block becomes compiled code at its first use: one graph for all blocks, of any number of rows and tokens.

    Raises:
        BaseModelError: weights would be dequantised in the midst of it.
    """
    if any(layer.cached_weight_OI is None for layer in quantized):
        raise BaseModelError(
            "runtime.compile is layers but dequantised weights are not kept (runtime.base_cache is off, or auto and memory is short); "
            "set runtime.base_cache to on, or runtime.compile to off."
        )
    # one for each adapter, with and without gradient, in training and in evaluation mode
    torch.compiler.config.recompile_limit = COMPILED_VARIANTS
    blocks_of_model = next(module for module in causal.base_model.children() if isinstance(module, nn.ModuleList))
    for block in blocks_of_model:
        block.compile(dynamic=True)


def pick_device(runtime: RuntimeParams) -> torch.device:
    """The device that `runtime.device` means on this machine.

    Raises:
        BaseModelError: a GPU is asked for and there is none.
    """
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise BaseModelError(
            "runtime.device is cuda but torch sees no GPU; set it to auto or cpu, or check driver and torch build."
        )
    if runtime.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def without_dropout(config: PretrainedConfig) -> None:
    """Puts out the base's own dropout, in place: it is off in every stage."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):  # attention_dropout, resid_pdrop, hidden_dropout_prob, layerdrop
            setattr(config, key, 0.0)


def output_head_name(causal: PreTrainedModel) -> str:
    """Of the module whose matrix gives logits; it is never quantised."""
    head = causal.get_output_embeddings()
    return next(name for name, module in causal.named_modules() if module is head)
