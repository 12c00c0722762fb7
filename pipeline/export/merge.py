"""An adapter and the base that it was trained on -> one plain model in 16 bit.

The base is the one that the adapter saw: NF4 weights are dequantised, exactly as every forward pass here does it, the
adapter's product is added in float32, and the sum is rounded once. Merging into 4 bits would round what was learnt away
(report huggingface/peft#2321); merging into weights that were never quantised would give another base than the trained one.
"""

from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from pipeline.backbone import Backbone
from pipeline.heads import ScalarHead
from pipeline.quantization import FrozenLinear4bit
from pipeline.sampling_linears import merged_weight
from pipeline.side_by_side import base_of, weight_of

SCORE = "score.weight"  # what transformers calls the scalar head of decoders


@torch.no_grad()
def merged_weights(backbone: Backbone, adapter: str) -> dict[str, Tensor]:
    """Every weight of the plain model under its plain name, linears as [out, in], in the base's precision on the CPU."""
    weights: dict[str, Tensor] = {}
    for name, module in backbone.causal.named_modules():
        plain = name.removesuffix(".base_layer")
        if isinstance(module, LoraLayer):  # its base layer, whose bias is still wanted, comes after it
            weights[f"{plain}.weight"] = merged_weight(weight_of(base_of(module)), module, adapter)
        elif ".lora_" not in name:
            for key, parameter in module.named_parameters(recurse=False):
                is_linear = key == "weight" and isinstance(module, FrozenLinear4bit | Conv1D)
                weights.setdefault(f"{plain}.{key}", weight_of(module) if is_linear else parameter)
    return {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}


def language_model(folder: Path, weights: dict[str, Tensor]) -> PreTrainedModel:
    """The plain causal model with these weights; `folder` is the base's, for its configuration."""
    config = _config(folder, weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return _filled(model, weights)


def classifier(folder: Path, weights: dict[str, Tensor], head: ScalarHead, pad_id: int) -> PreTrainedModel:
    """The plain sequence-classification model with one label, its score read at the last token that is not `pad_id`.

    No decoder of transformers has a bias in that head, so the shift stands in the configuration: score = logit + config.score_shift.
    """
    config = _config(folder, weights)
    config.num_labels, config.pad_token_id = 1, pad_id
    config.score_shift = head.linear.bias.item()
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    wanted = model.state_dict().keys()
    kept = {key: weight for key, weight in weights.items() if key in wanted}
    return _filled(model, kept | {SCORE: head.linear.weight.detach().cpu()})


def _config(folder: Path, weights: dict[str, Tensor]) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(folder)  # nosec B615  # a local folder
    config.dtype = next(iter(weights.values())).dtype
    return config


def _filled(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    wanted = model.state_dict().keys()
    model.load_state_dict(
        {
            key: weight.T.contiguous() if key in transposed else weight
            for key, weight in weights.items()
            if key in wanted
        },
        assign=True,
    )
    model.tie_weights()
    return model


def size_of(model: PreTrainedModel) -> int:
    """Bytes of the weights, those that are tied once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
