"""Forward passes a second time: one row, no padding, full logits, torch.log_softmax.

Nothing here goes through the pipeline's own forward: not its padding, positions, adapter switches, blocks, LoRA layers or
column arithmetic. An adapter is a table of plain matrices, put in by hooks that compute base(x) + B(A(x)) * alpha / r.

Axes: T tokens of one row, R response tokens of one row, H hidden, V vocabulary.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.blocks import transformers_forwards


@dataclass(frozen=True)
class Matrices:
    """One layer's adapter: its output is A, then B, times `scale`; float32."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


Adapter = dict[str, Matrices]
"""Layer name -> matrices."""


@dataclass(frozen=True)
class Head:
    """A scalar head: states @ weight_H + bias."""

    weight_H: Tensor
    bias: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """[..., H] -> [...]."""
        return (states.float() * self.weight_H).sum(-1) + self.bias


@dataclass(frozen=True)
class RowPass:
    """What one answer looks like to a policy.

    logprobs_R, entropies_R: of each token and of the distribution it came from, in nats.
    variances_R: variance of -log p under that distribution.
    states_RH: the final hidden state BEFORE each token.
    """

    logprobs_R: Tensor
    entropies_R: Tensor
    variances_R: Tensor
    states_RH: Tensor


def saved_adapter(folder: Path, device: torch.device) -> Adapter:
    """An adapter as PEFT's files have it."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = settings["lora_alpha"] / settings["r"]
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model."): Matrices(
            tensors[f"{name}.lora_A.weight"].to(device), tensors[f"{name}.lora_B.weight"].to(device), scale
        )
        for name in names
    }


def saved_head(folder: Path, device: torch.device) -> Head:
    """A head as its file has it."""
    tensors = load_file(folder / "head.safetensors")
    return Head(tensors["linear.weight"][0].to(device), tensors["linear.bias"][0].to(device))


def live_adapter(causal: nn.Module, name: str, scale: float) -> Adapter:
    """Adapter `name` as it stands in the model now, copied; its matrices may be asked for gradients."""
    return {
        layer: Matrices(_copied(module.lora_A[name].weight), _copied(module.lora_B[name].weight), scale)
        for layer, module in lora_layers(causal)
        if name in module.lora_A
    }


def live_head(head: nn.Module) -> Head:
    """A critic's or reward model's head as it stands now, copied."""
    return Head(_copied(head.linear.weight[0]), _copied(head.linear.bias[0]))


def lora_layers(causal: nn.Module) -> list[tuple[str, LoraLayer]]:
    """(name, layer) of all layers that have adapters."""
    return [(name, module) for name, module in causal.named_modules() if isinstance(module, LoraLayer)]


def answer_pass(
    causal: nn.Module, adapter: Adapter | None, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> RowPass:
    """The answer's tokens under softmax(logits / temperature), from a forward over the whole row."""
    logits_TV, states_TH = _forward(causal, adapter, [*prompt, *answer])
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    logprobs, entropies, variances, states = [], [], [], []
    for place, token in enumerate(answer, start=len(prompt)):
        before = place - 1  # the logits that chose a token stand one place before it
        row_V = logprobs_TV[before]
        seen_V = row_V.detach()
        entropy = -(seen_V.exp() * seen_V).sum()
        logprobs.append(row_V[token])
        entropies.append(entropy)
        variances.append((seen_V.exp() * (-seen_V - entropy) ** 2).sum())
        states.append(states_TH[before])
    return RowPass(torch.stack(logprobs), torch.stack(entropies), torch.stack(variances), torch.stack(states))


def score_pass(causal: nn.Module, adapter: Adapter, head: Head, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """A reward model's score: its head on the state at the last token of the row."""
    with torch.no_grad():
        _, states_TH = _forward(causal, adapter, [*prompt, *answer])
        return float(head(states_TH[-1]))


def worst_linear(causal: nn.Module) -> tuple[str, float]:
    """Of the 4-bit layers the one that is furthest from x @ dequantised weight, in its output or in the gradient of x.

    Relative to the size of either; ("", 0) without 4-bit layers.
    """
    worst, found = "", 0.0
    for name, layer in causal.named_modules():
        if isinstance(layer, Linear4bit):
            weight_OI = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(layer.compute_dtype)
            x_NI = torch.linspace(-1, 1, 2 * layer.in_features, device=weight_OI.device).view(2, -1)
            x_NI = x_NI.to(weight_OI).requires_grad_()
            bias = None if layer.bias is None else layer.bias.to(x_NI)
            expected_NO, output_NO = F.linear(x_NI, weight_OI, bias), layer(x_NI)
            error = _distance(output_NO, expected_NO)
            if output_NO.requires_grad:
                error = max(
                    error, _distance(*(torch.autograd.grad(y_NO.sum(), x_NI)[0] for y_NO in (output_NO, expected_NO)))
                )
            else:
                error = math.inf
            if not error <= found:
                worst, found = name, error
    return worst, found


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def _forward(causal: nn.Module, adapter: Adapter | None, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(logits_TV, states_TH) in float32, in eval mode, whatever adapter the pipeline has switched on; None: the raw base."""
    states: list[Tensor] = []
    head = causal.get_output_embeddings()
    device = next(causal.parameters()).device
    with _eval_mode(causal), transformers_forwards(causal), _only(causal, adapter):
        hook = head.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
        try:
            output = causal(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
        finally:
            hook.remove()
    return output.logits[0].float(), states[0][0].float()


@contextlib.contextmanager
def _only(causal: nn.Module, adapter: Adapter | None) -> Iterator[None]:
    """Every LoRA layer answers with its base layer and these matrices alone."""
    hooks = []
    for name, module in lora_layers(causal):
        matrices = None if adapter is None else adapter.get(name)

        def replaced(layer: LoraLayer, arguments: tuple, _: Tensor, matrices: Matrices | None = matrices) -> Tensor:
            x = arguments[0]
            result = layer.base_layer(x)
            if matrices is None:
                return result
            low_rank = F.linear(F.linear(x.float(), matrices.a_RI), matrices.b_OR) * matrices.scale
            return result + low_rank.to(result.dtype)

        hooks.append(module.register_forward_hook(replaced))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _eval_mode(causal: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in causal.modules()]
    causal.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _copied(parameter: Tensor) -> Tensor:
    return parameter.detach().float().clone()
