"""Beat 3: epochs x minibatches x micro-batches; the only optimizer.step in the project."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from pipeline import processes, ranks
from pipeline.batch import Batch, Experience, Sequences, microbatches
from pipeline.data.examples import epochs_of
from pipeline.errors import TrainingError
from pipeline.objectives.offline import sft
from pipeline.objectives.terms import Terms
from pipeline.out_of_memory import MICROBATCH
from pipeline.randomness import permutation
from pipeline.roles import Policy, PolicyOutput

ADAM_EPS = 1e-5
NON_FINITE_LIMIT = 3  # steps in a row

Objective = Callable[[Any, Batch], Terms]
Figures = dict[str, float]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a peak learning rate and are clipped together."""

    name: str
    parameters: list[nn.Parameter]
    lr: float


class Optimizer:
    """Adam without weight decay over a few groups, each with its own learning rate and its own gradient clipping.

    `schedule` gives the factor on the peak learning rates at a step, counted from 0.
    """

    def __init__(self, groups: list[ParameterGroup], max_grad_norm: float, schedule: Callable[[int], float]):
        self.groups = groups
        self.max_grad_norm = max_grad_norm
        self.schedule = schedule
        self.steps_taken = 0
        self.non_finite_in_a_row = 0
        settings = [{"params": group.parameters, "lr": group.lr} for group in groups]
        # foreach=False: one fixed order of operations on every device
        chosen: dict[str, Any] = {"eps": ADAM_EPS, "weight_decay": 0.0, "foreach": False}
        if ranks.in_step():
            # each process has the moments of some parameters, steps these, and sends them to the others
            self._adam = ZeroRedundancyOptimizer(settings, torch.optim.Adam, **chosen)
            self._own = self._adam.optim
        else:
            self._adam = self._own = torch.optim.Adam(settings, **chosen)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def sizes(self) -> dict[str, int]:
        """How many weights each group has."""
        return {group.name: sum(parameter.numel() for parameter in group.parameters) for group in self.groups}

    def zero_grad(self) -> None:
        """Forgets gradients."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, loss: float) -> dict[str, float]:
        """One step with the gradients at hand, unless loss or gradients are not finite; then they are thrown away.

        Of several processes all come here, each with its own gradients, and take the step that the sums of them call for.

        Raises:
            TrainingError: that happened several times in a row.
        """
        ranks.add_up_gradients(self.parameters)
        norms = {
            group.name: float(nn.utils.clip_grad_norm_(group.parameters, self.max_grad_norm)) for group in self.groups
        }
        factor = self.schedule(self.steps_taken)
        stats = {f"grad_norm_{name}": norm for name, norm in norms.items()}
        finite = math.isfinite(loss) and all(map(math.isfinite, norms.values()))
        self.non_finite_in_a_row = 0 if finite else self.non_finite_in_a_row + 1
        if self.non_finite_in_a_row >= NON_FINITE_LIMIT:
            raise TrainingError(
                f"Loss or gradient was not finite {NON_FINITE_LIMIT} steps in a row (loss {loss}, gradient norms {norms}); "
                "no such step was taken. Lower the learning rate, or look for broken rows in the data."
            )
        self.steps_taken += 1
        if finite:
            for settings, group in zip(self._adam.param_groups, self.groups, strict=True):
                settings["lr"] = group.lr * factor
                stats[f"lr_{group.name}"] = group.lr * factor
            self._adam.step()
        self.zero_grad()
        return stats | {"non_finite_steps": float(self.non_finite_in_a_row > 0)}

    def state_dict(self) -> dict[str, Any]:
        """Weights, Adam's moments and step counts, and the place in the schedule; the tensors are those in use."""
        # a parameter that has had no gradient yet has no moments
        moments = {str(index): dict(of_one) for index, of_one in self._own.state_dict()["state"].items()}
        return {
            "steps_taken": self.steps_taken,
            "non_finite_in_a_row": self.non_finite_in_a_row,
            "weights": {group.name: list(group.parameters) for group in self.groups},
            "adam": ranks.exchange(moments) if ranks.in_step() else moments,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with the same groups."""
        self.steps_taken = state["steps_taken"]
        self.non_finite_in_a_row = state["non_finite_in_a_row"]
        for group in self.groups:
            for parameter, weights in zip(group.parameters, state["weights"][group.name], strict=True):
                parameter.copy_(weights)
        saved = state["adam"][processes.rank()] if ranks.in_step() else state["adam"]
        moments = {int(index): of_one for index, of_one in saved.items()}
        self._own.load_state_dict({"state": moments, "param_groups": self._own.state_dict()["param_groups"]})


def cosine_to_tenth(total_steps: int, warmup_share: float) -> Callable[[int], float]:
    """A linear rise over the first share of the steps, then a cosine down to a tenth."""
    warmup = math.ceil(total_steps * warmup_share)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total_steps - warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def constant_after_warmup(warmup_steps: int) -> Callable[[int], float]:
    """A linear rise, then 1."""
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def accumulate(
    model: Callable[[Batch], Any], minibatch: Batch, objective: Objective, microbatch_tokens: int
) -> dict[str, float]:
    """Gradients of the minibatch's loss, micro-batch by micro-batch; the means of its terms.

    Of several processes each has the gradients of its own rows, which `Optimizer.step` adds up, and the means over all.
    Each micro-batch gives a SUM, divided by the minibatch's number of terms: the size of micro-batches changes nothing
    but memory, speed and rounding.
    """
    passes: list[tuple[Figures, Figures]] = []
    for rows, micro in microbatches(minibatch, microbatch_tokens):
        micro = micro.to(model.device)
        terms = objective(model(micro), micro)
        if len(rows) == 0:
            terms = terms.uncounted()
        (terms.loss_sum / minibatch.num_terms).backward()
        passes.append((_numbers(terms.sums), _numbers(terms.maxima)))
    sums: Figures = {}
    maxima: Figures = {}
    for of_pass, largest in chain.from_iterable(ranks.gather(passes)):
        for name, value in of_pass.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in largest.items():
            maxima[name] = max(maxima.get(name, -math.inf), value)
    return {name: value / minibatch.num_terms for name, value in sums.items()} | maxima


@dataclass(frozen=True)
class UpdatePlan:
    """How often a rollout is gone through, in what pieces, and when to stop.

    stop_kl: where the mean k3 between old and new policy exceeds it, that step and the rest are left out; None for never.
    """

    epochs: int
    minibatch_size: int
    microbatch_tokens: int
    stop_kl: float | None

    def ends_at(self, stats: Figures) -> bool:
        """Whether the step with these figures is one too many."""
        return self.stop_kl is not None and stats.get("update_k3", 0.0) > self.stop_kl


@dataclass(frozen=True)
class Rehearsal:
    """Demonstrations that are learnt alongside, so that the policy forgets less (Ouyang et al. 2022, equation 2: ptx).

    policy: the actor as SFT sees it, at temperature 1 and without a critic.
    coef: weight of the SFT loss.
    """

    policy: Policy
    demonstrations: Sequences
    coef: float

    def accumulate(self, batch: Sequences, microbatch_tokens: int) -> float:
        """Adds the weighted gradients of the batch's SFT loss; the loss itself, in nats per token."""

        def weighted(output: PolicyOutput, rows: Sequences) -> Terms:
            terms = sft(output.logprobs_BR, rows.response_mask_BR)
            return Terms(self.coef * terms.loss_sum, terms.sums)

        return accumulate(self.policy, batch, weighted, microbatch_tokens)["loss"]


def update(
    policy: Callable[[Experience], Any],
    optimizer: Optimizer,
    experience: Experience,
    objective: Objective,
    plan: UpdatePlan,
    seed: int,
    rehearsal: Rehearsal | None = None,
    taken: tuple[Figures, ...] = (),
    reached: Callable[[tuple[Figures, ...]], None] = lambda _: None,
) -> dict[str, float]:
    """PPO's inner loop over one rollout; means over its optimizer steps, and the largest of what ends in _max.

    The first epoch takes the rows in the order in which they were evaluated, later epochs in other orders. With a
    rehearsal each step has, besides, a batch of as many demonstrations, in an order of `seed`.

    Args:
        taken: figures of the steps that an earlier process has taken.
        reached: told after each step the figures of all until then.
    """
    planned = plan.epochs * -(-len(experience) // plan.minibatch_size)
    rehearsed = rehearsal and islice(
        epochs_of(rehearsal.demonstrations, plan.minibatch_size, planned, seed), len(taken), None
    )
    stopped: tuple[Figures, ...] = ()
    for minibatch in islice(_minibatches(experience, plan, seed), len(taken), None):
        beside = (rehearsal, next(rehearsed)) if rehearsal else None
        gradients = partial(_gradients, policy, minibatch, objective, plan, beside)
        stats = MICROBATCH.fit(plan.microbatch_tokens, gradients, undo=optimizer.zero_grad)
        if plan.ends_at(stats):
            optimizer.zero_grad()
            stopped = (finite(stats),)
            break
        stats |= optimizer.step(stats["loss"])
        taken += (finite(stats),)
        reached(taken)
    return _summary(taken + stopped) | {
        "update_steps": float(len(taken)),
        "update_steps_skipped": float(planned - len(taken)),
    }


def _gradients(
    policy: Callable[[Experience], Any],
    minibatch: Experience,
    objective: Objective,
    plan: UpdatePlan,
    beside: tuple[Rehearsal, Sequences] | None,
    microbatch_tokens: int,
) -> Figures:
    """Those of one optimizer step; the step's figures."""
    stats = accumulate(policy, minibatch, objective, microbatch_tokens)
    if beside is not None and not plan.ends_at(stats):
        rehearsal, demonstrations = beside
        stats["ptx_loss"] = rehearsal.accumulate(demonstrations, microbatch_tokens)
        stats["loss"] += rehearsal.coef * stats["ptx_loss"]
    return stats


def _numbers(tensors: dict[str, Tensor]) -> Figures:
    return {name: float(value) for name, value in tensors.items()}


def _minibatches(experience: Experience, plan: UpdatePlan, seed: int) -> Iterator[Experience]:
    for epoch in range(plan.epochs):
        order = torch.arange(len(experience)) if epoch == 0 else permutation(len(experience), seed, epoch)
        yield from experience.select(order).split(plan.minibatch_size)


def finite(figures: dict[str, float]) -> Figures:
    """Without what is NaN or infinite: a step that was left out has no figures, and no average is spoilt by it."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _summary(history: tuple[Figures, ...]) -> dict[str, float]:
    summary = {"first_log_ratio_max": history[0].get("log_ratio_max", 0.0)}
    for name in dict.fromkeys(name for stats in history for name in stats):
        values = [stats[name] for stats in history if name in stats]
        summary[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return summary
