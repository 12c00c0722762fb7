"""A base folder -> a Backbone: quantised, frozen, on its device."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from pipeline import attention as recompute
from pipeline import blocks
from pipeline.backbone import Backbone, BaseIdentity
from pipeline.errors import BaseModelError
from pipeline.params.base import BaseParams
from pipeline.params.runtime import RuntimeParams
from pipeline.quantization import FrozenLinear4bit, check_shapes, fill_cache, replace_forwards

COMPILED_VARIANTS = 64


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
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=params.trust_remote_code)
            check_shapes(skeleton, skipped={output_head_name(skeleton)})
        causal = AutoModelForCausalLM.from_pretrained(  # nosec B615  # a local folder
            folder,
            config=config,
            dtype=dtype,
            quantization_config=quantization,
            attn_implementation=attention,
            trust_remote_code=params.trust_remote_code,
            use_safetensors=True,
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
    leave_file(causal)
    blocks.replace_forwards(causal)
    layers = replace_forwards(causal, dtype)
    if identity.tokenizer_length > causal.get_input_embeddings().weight.shape[0]:
        raise BaseModelError(
            f"The tokenizer of base.model has {identity.tokenizer_length} tokens but the embedding table {causal.get_input_embeddings().weight.shape[0]} rows; "
            "a token was added without a row for it: use the tokenizer that came with the model."
        )
    if runtime.launch != "fsdp":  # which would hold the base whole in each process
        fill_cache(layers, runtime.base_cache, device)
    if runtime.compile == "layers":
        compile_layers(causal, layers)
    return Backbone(
        causal, device, identity, runtime.gradient_checkpointing, runtime.packing, sharded=runtime.launch == "fsdp"
    )


def leave_file(causal: PreTrainedModel) -> None:
    """Copies on the CPU what lies in the mapped file of weights: one tensor left there would keep all of its pages in memory."""
    for tensor in (*causal.parameters(), *causal.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


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
