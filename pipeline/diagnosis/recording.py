"""Two iterations of the real loop, listened to at its seams: what each beat was given and what it made of it.

The policy is first moved away from the reference and the value head away from 0: at the very start KL is 0 and the ratio
1, and most faults would not show.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.algorithms import ppo as ppo_algorithm
from pipeline.batch import Experience
from pipeline.data.examples import Prompt
from pipeline.diagnosis.naive_model import Adapter, Head, live_adapter, live_head, lora_layers
from pipeline.diagnosis.opening import Loop
from pipeline.objectives.terms import Terms
from pipeline.params.ppo import PPOParams
from pipeline.roles import PolicyOutput
from pipeline.rollout import Sampling, generate

STEP_LR = 1e-3  # not the user's: a bad learning rate is a setting, and must not blur the comparison of code
PUSH = 0.2  # how far the policy is moved at first, in standard deviations of each matrix
AFTERWARDS = 4  # answers of the second iteration, which shows whether the moved policy is the one that samples


@dataclass(frozen=True)
class Weights:
    """What is trained, as it stood at one moment."""

    adapter: Adapter
    head: Head

    def named(self) -> dict[str, Tensor]:
        """Every trained tensor by name."""
        adapter = {
            f"{layer}.{matrix}": tensor
            for layer, pair in self.adapter.items()
            for matrix, tensor in (("A", pair.a_RI), ("B", pair.b_OR))
        }
        return adapter | {"value_head.weight": self.head.weight_H, "value_head.bias": self.head.bias}


@dataclass(frozen=True)
class Heard:
    """One call of the objective: what it was given, and what it returned, without graph."""

    logprobs_BR: Tensor
    values_BR: Tensor | None
    batch: Experience
    loss_sum: float
    sums: dict[str, float]


@dataclass(frozen=True)
class Step:
    """One optimizer step: the weights before and after, the micro-batches, the gradients before clipping."""

    before: Weights
    after: Weights
    heard: list[Heard]
    gradients: dict[str, Tensor]


@dataclass
class Recording:
    """What was listened to.

    cfg: the user's parameters but for sizes and learning rates.
    asked: the prompts of each iteration.
    experiences, stats: of each iteration.
    steps: the optimizer steps of the first iteration.
    """

    cfg: PPOParams
    asked: list[list[Prompt]]
    sampling: Sampling
    experiences: list[Experience] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class _ListeningAlgorithm:
    """The real algorithm; each call of its objective is kept."""

    def __init__(self, algorithm: Any):
        self._algorithm = algorithm
        self.heard: list[Heard] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def objective(self, output: PolicyOutput, batch: Experience) -> Terms:
        terms = self._algorithm.objective(output, batch)
        values_BR = None if output.values_BR is None else output.values_BR.detach().cpu()
        sums = {name: float(value) for name, value in terms.sums.items()}
        self.heard.append(
            Heard(
                output.logprobs_BR.detach().cpu(), values_BR, batch.to(torch.device("cpu")), float(terms.loss_sum), sums
            )
        )
        return terms


class _ListeningOptimizer:
    """The real optimizer; weights and gradients around each of its steps are kept."""

    def __init__(self, optimizer: Any, loop: Loop, scale: float, algorithm: _ListeningAlgorithm):
        self._optimizer = optimizer
        self._loop = loop
        self._scale = scale
        self._algorithm = algorithm
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, loss: float) -> dict[str, float]:
        before, gradients = trained_weights(self._loop, self._scale), _gradients(self._loop)
        stats = self._optimizer.step(loss)
        heard, self._algorithm.heard = self._algorithm.heard, []
        self.steps.append(Step(before, trained_weights(self._loop, self._scale), heard, gradients))
        return stats


def trained_weights(loop: Loop, scale: float) -> Weights:
    """Policy adapter and value head as they stand, copied."""
    return Weights(live_adapter(loop.policy.backbone.causal, "policy", scale), live_head(loop.policy.value_head))


def record(loop: Loop, rows: int, scale: float) -> Recording:
    """Two iterations: `rows` answers in two minibatches, gone through twice; then a few answers of the moved policy.

    Args:
        scale: alpha / r of the adapters.
    """
    rows = min(rows, len(loop.questions)) // 2 * 2
    cfg = loop.cfg.model_copy(
        update={
            "rollout_size": rows,
            "minibatch_size": rows // 2,
            "epochs": 2,
            "lr": STEP_LR,
            "value_lr": STEP_LR,
            "critic_warmup": 0,
            "stop_kl": None,
        }
    )
    loop.restart()
    push(loop)
    asked = [loop.questions[:rows], loop.questions[:AFTERWARDS]]
    sampling = mixed_endings(loop, asked[0])
    recording = Recording(cfg, asked, sampling)
    algorithm = _ListeningAlgorithm(ppo_algorithm(cfg))
    optimizer = _ListeningOptimizer(loop.optimizer(cfg), loop, scale, algorithm)

    def log(step: int, stats: dict[str, float], experience: Experience) -> None:
        recording.experiences.append(experience)
        recording.stats.append(stats)
        if step == 0:
            recording.steps = list(optimizer.steps)

    loop.run(cfg, asked, log, optimizer=optimizer, algorithm=algorithm, sampling=sampling)
    return recording


def mixed_endings(loop: Loop, asked: list[Prompt]) -> Sampling:
    """The user's sampling, so limited that some answers end and some are cut.

    Where no answer would be cut, the limit is their median length; where none would end, a token that one of them holds
    ends answers too.
    """
    rollout = generate(loop.policy, asked, loop.sampling, step=0)
    lengths = sorted(rollout.response_lengths_B.tolist())
    if rollout.truncated_B.all():
        token = int(rollout.response_ids_BR[0, lengths[0] // 2])
        return replace(loop.sampling, stop_ids=(*loop.sampling.stop_ids, token))
    if not rollout.truncated_B.any():
        return replace(loop.sampling, max_new_tokens=lengths[(len(lengths) - 1) // 2])
    return loop.sampling


@torch.no_grad()
def push(loop: Loop) -> None:
    """Moves the policy and the value head at random, the same way each time."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor, size: float) -> Tensor:
        return (torch.randn(tensor.shape, generator=generator) * size).to(tensor)

    for _, layer in lora_layers(loop.policy.backbone.causal):
        for matrix in (layer.lora_A["policy"].weight, layer.lora_B["policy"].weight):
            matrix.add_(noise(matrix, PUSH * float(matrix.std()) + 1e-4))
    head = loop.policy.value_head.linear
    head.weight.add_(noise(head.weight, (head.in_features + 1) ** -0.5))
    head.bias.add_(0.1)


def _gradients(loop: Loop) -> dict[str, Tensor]:
    """Of every trained tensor, zeros where there is none; copied."""
    parameters = {}
    for name, layer in lora_layers(loop.policy.backbone.causal):
        parameters |= {f"{name}.A": layer.lora_A["policy"].weight, f"{name}.B": layer.lora_B["policy"].weight}
    head = loop.policy.value_head.linear
    parameters |= {"value_head.weight": head.weight, "value_head.bias": head.bias}
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in parameters.items()
    }
    found["value_head.weight"] = found["value_head.weight"][0]
    found["value_head.bias"] = found["value_head.bias"][0]
    return found
