"""Two iterations of the real loop, listened to at its seams: what each beat was given and what it made of it.

The policy is first moved away from the reference and the value head away from 0: at the very start KL is 0 and the ratio
1, and most faults would not show.
"""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.algorithms import Algorithm
from pipeline.batch import Experience, Sequences
from pipeline.data.examples import Prompt
from pipeline.diagnosis.naive_model import Adapter, Head, live_adapter, live_head, lora_layers
from pipeline.diagnosis.opening import Case
from pipeline.evaluation import evaluate
from pipeline.objectives.terms import Terms
from pipeline.online import optimizer_for
from pipeline.params.ppo import PPOParams
from pipeline.roles import Policy, PolicyOutput
from pipeline.rollout import Sampling, generate
from pipeline.update import Optimizer, Rehearsal

STEP_LR = 1e-3  # not the user's: a bad learning rate is a setting, and must not blur the comparison of code
PUSH = 0.2  # how far the policy is moved at first, in standard deviations of each matrix
AFTERWARDS = 4  # prompts of the second iteration, which shows whether the moved policy is the one that samples
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Weights:
    """What is trained, as it stood at one moment. head: None without a critic."""

    adapter: Adapter
    head: Head | None

    def named(self) -> dict[str, Tensor]:
        """Every trained tensor by name."""
        adapter = {
            f"{layer}.{matrix}": tensor
            for layer, pair in self.adapter.items()
            for matrix, tensor in (("A", pair.a_RI), ("B", pair.b_OR))
        }
        head = {} if self.head is None else {"value_head.weight": self.head.weight_H, "value_head.bias": self.head.bias}
        return adapter | head


@dataclass(frozen=True)
class Heard:
    """One call of the objective: what it was given, and the sums it returned, without graph."""

    logprobs_BR: Tensor
    values_BR: Tensor | None
    batch: Experience
    sums: dict[str, float]


@dataclass(frozen=True)
class Step:
    """One optimizer step: weights before and after, micro-batches, demonstrations beside them, gradients before clipping."""

    before: Weights
    after: Weights
    heard: list[Heard]
    rehearsed: list[Sequences]
    gradients: dict[str, Tensor]


@dataclass
class Recording:
    """What was listened to.

    cfg: the user's parameters but for sizes and learning rates.
    asked: the prompts of each iteration.
    experiences, stats: of each iteration.
    steps: the optimizer steps of the first iteration.
    stressed: calls of the objective with log-probs, values and weights far from the old ones, so that each branch is taken.
    shifted: the first rollout evaluated again as if the sampler had been another policy.
    """

    cfg: PPOParams
    asked: list[list[Prompt]]
    sampling: Sampling
    experiences: list[Experience] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stressed: list[Heard] = field(default_factory=list)
    shifted: Experience | None = None


@dataclass(frozen=True)
class _ListeningAlgorithm(Algorithm):
    """The real algorithm; each call of its objective is kept."""

    heard: list[Heard] = field(default_factory=list)

    @classmethod
    def to(cls, algorithm: Algorithm) -> "_ListeningAlgorithm":
        """Listens to an algorithm."""
        return cls(**{part.name: getattr(algorithm, part.name) for part in fields(Algorithm)})

    def objective(self, output: PolicyOutput, batch: Experience) -> Terms:
        """The real one."""
        terms = super().objective(output, batch)
        values_BR = None if output.values_BR is None else output.values_BR.detach().to(CPU)
        sums = {name: float(value.detach()) for name, value in terms.sums.items()}
        sums["differentiable"] = float(terms.loss_sum.detach())
        self.heard.append(Heard(output.logprobs_BR.detach().to(CPU), values_BR, batch.to(CPU), sums))
        return terms


class _ListeningPolicy:
    """The policy that learns demonstrations beside; each batch of them is kept."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.device = policy.device
        self.heard: list[Sequences] = []

    def __call__(self, batch: Sequences) -> PolicyOutput:
        self.heard.append(batch.to(CPU))
        return self.policy(batch)


class _ListeningOptimizer:
    """The real optimizer; weights and gradients around each of its steps are kept."""

    def __init__(
        self, optimizer: Optimizer, policy: Policy, scale: float, heard: list[Heard], rehearsed: list[Sequences]
    ):
        self.optimizer = optimizer
        self.policy = policy
        self.scale = scale
        self.heard = heard
        self.rehearsed = rehearsed
        self.steps: list[Step] = []

    def zero_grad(self) -> None:
        """The real one."""
        self.optimizer.zero_grad()

    def step(self, loss: float) -> dict[str, float]:
        """The real one."""
        before, gradients = trained_weights(self.policy, self.scale), _gradients(self.policy)
        stats = self.optimizer.step(loss)
        after = trained_weights(self.policy, self.scale)
        self.steps.append(Step(before, after, list(self.heard), list(self.rehearsed), gradients))
        self.heard.clear()
        self.rehearsed.clear()
        return stats


def record(case: Case, rows: int, scale: float) -> Recording:
    """Two iterations: about `rows` answers in two minibatches, gone through twice; then a few answers of the moved policy.

    Args:
        scale: alpha / r of the adapters.
    """
    cfg = _small(case.cfg, min(rows, len(case.questions) * case.cfg.answers_per_prompt))
    case.restart()
    push(case.loop.policy)
    asked = [case.questions[: cfg.prompts_per_iteration], case.questions[:AFTERWARDS]]
    sampling = mixed_endings(case, asked[0])
    recording = Recording(cfg, asked, sampling)
    algorithm = _ListeningAlgorithm.to(case.loop.algorithm)
    rehearsal, rehearsed = case.loop.rehearsal, []
    if rehearsal is not None:
        policy = _ListeningPolicy(rehearsal.policy)
        rehearsal, rehearsed = Rehearsal(policy, rehearsal.demonstrations, rehearsal.coef), policy.heard
    optimizer = _ListeningOptimizer(
        optimizer_for(case.loop.policy, cfg), case.loop.policy, scale, algorithm.heard, rehearsed
    )

    def log(step: int, stats: dict[str, float], experience: Experience) -> None:
        recording.experiences.append(experience)
        recording.stats.append(stats)
        if step == 0:
            recording.steps = list(optimizer.steps)

    loop = replace(case.loop, algorithm=algorithm, rehearsal=rehearsal, sampling=sampling)
    loop.train(cfg, asked, optimizer, log, lambda _: None)
    recording.stressed = _stressed(algorithm, recording.steps[0].heard)
    recording.shifted = _shifted(case, cfg, recording.experiences[0])
    return recording


def mixed_endings(case: Case, asked: list[Prompt]) -> Sampling:
    """The user's sampling, so limited that some answers end and some are cut.

    Where no answer would be cut, the limit is their median length; where none would end, the token that comes nearest to
    being in half of them ends answers too.
    """
    sampling = case.loop.sampling
    rollout = generate(case.loop.policy, asked, sampling, step=0)
    lengths = sorted(rollout.response_lengths_B.tolist())
    if rollout.truncated_B.all():
        held = Counter(token for ids in rollout.response_ids_BR.tolist() for token in set(ids))
        token = min(held, key=lambda token: (abs(held[token] - len(rollout) / 2), token))
        return replace(sampling, stop_ids=(*sampling.stop_ids, token))
    if not rollout.truncated_B.any():
        return replace(sampling, max_new_tokens=lengths[(len(lengths) - 1) // 2])
    return sampling


@torch.no_grad()
def push(policy: Policy) -> None:
    """Moves the policy and the value head at random, the same way each time."""
    generator = torch.Generator().manual_seed(0)
    for _, layer in lora_layers(policy.backbone.causal):
        for matrix in (layer.lora_A[policy.adapter].weight, layer.lora_B[policy.adapter].weight):
            matrix.add_(_noise(matrix, PUSH * float(matrix.std()) + 1e-4, generator))
    if policy.value_head is not None:
        head = policy.value_head.linear
        head.weight.add_(_noise(head.weight, (head.in_features + 1) ** -0.5, generator))
        head.bias.add_(0.1)


def trained_weights(policy: Policy, scale: float) -> Weights:
    """Policy adapter and value head as they stand, copied."""
    head = None if policy.value_head is None else live_head(policy.value_head)
    return Weights(live_adapter(policy.backbone.causal, "policy", scale), head)


def _small(cfg: PPOParams, rows: int) -> PPOParams:
    """The same parameters for a rollout of about `rows` answers: whole groups, in two minibatches of equal size."""
    groups = max(2, rows // cfg.answers_per_prompt // 2 * 2)
    rows = groups * cfg.answers_per_prompt
    return cfg.model_copy(
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


def _stressed(algorithm: _ListeningAlgorithm, heard: list[Heard]) -> list[Heard]:
    generator = torch.Generator().manual_seed(1)
    algorithm.heard.clear()
    for call in heard:
        batch = call.batch
        far = _noise(batch.old_logprobs_BR, 0.6, generator)
        values_BR = None if call.values_BR is None else batch.values_BR + _noise(batch.values_BR, 0.5, generator)
        weights_BR = torch.rand(batch.weights_BR.shape, generator=generator) + 0.5
        output = PolicyOutput(batch.old_logprobs_BR + far, values_BR)
        algorithm.objective(output, replace(batch, weights_BR=weights_BR))
    return list(algorithm.heard)


def _shifted(case: Case, cfg: PPOParams, experience: Experience) -> Experience:
    generator = torch.Generator().manual_seed(2)
    noise_BR = _noise(experience.behaviour_logprobs_BR, 0.8, generator)
    rollout = replace(experience, behaviour_logprobs_BR=experience.behaviour_logprobs_BR + noise_BR)
    loop = case.loop
    score = loop.rewards.by_minibatch(cfg.minibatch_size)
    return evaluate(rollout, loop.policy, loop.reference, score, loop.algorithm, cfg, loop.microbatch_tokens)


def _gradients(policy: Policy) -> dict[str, Tensor]:
    """Of every trained tensor, zeros where there is none; copied."""
    parameters: dict[str, Any] = {}
    for name, layer in lora_layers(policy.backbone.causal):
        parameters |= {f"{name}.A": layer.lora_A["policy"].weight, f"{name}.B": layer.lora_B["policy"].weight}
    if policy.value_head is not None:
        head = policy.value_head.linear
        parameters |= {"value_head.weight": head.weight, "value_head.bias": head.bias}
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in parameters.items()
    }
    return {name: gradient[0] if name.startswith("value_head") else gradient for name, gradient in found.items()}


def _noise(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(like.shape, generator=generator) * size).to(like)
