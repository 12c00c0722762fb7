"""The third and fourth beat: minibatches, losses, gradients, the optimizer's step, and the policy that samples next."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pipeline.batch import Experience
from pipeline.diagnosis import naive_math
from pipeline.diagnosis.beats_rollout import answers_of, cut, logprobs
from pipeline.diagnosis.compare import ARITHMETIC, Beat, Tolerance, compare
from pipeline.diagnosis.naive_math import Scalar, Token
from pipeline.diagnosis.naive_model import Adapter, Head, answer_pass
from pipeline.diagnosis.recording import Heard, Recording, Step, Weights
from pipeline.diagnosis.truth import Rows, Truth
from pipeline.params.ppo import PPOParams

STEPS_WITH_GRADIENT = 2  # the first, whose ratios are all 1, and the second, whose are not
STEP_LIMIT = 1e-3  # of a step's own size: float32 moments against float64
LOSSES = ("policy_loss", "value_loss", "loss")


def check_update(recording: Recording, truth: Truth, tolerance: Tolerance, gradient_limit: float) -> list[Beat]:
    """All beats of `update`, in its order, and the log-probabilities of the rollout after it."""
    steps = recording.steps[:STEPS_WITH_GRADIENT]
    recomputed = [_recompute(step, truth, recording.cfg) for step in steps]
    heard = [call for step in steps for call in step.heard]
    found = [row for call in heard for row in cut(call.logprobs_BR, rows_heard([call]))]
    values = [row for call in heard for row in cut(call.values_BR, rows_heard([call]))]
    module = "pipeline/roles.py, update.py, online.py"
    return [
        _minibatches(recording),
        compare("update: log-probs", module, found, [row for again in recomputed for row in again.logprobs], tolerance),
        compare("update: values", module, values, [row for again in recomputed for row in again.values], tolerance),
        *_losses(recording),
        _gradients(steps, [again.gradients for again in recomputed], gradient_limit),
        _optimizer(recording),
    ]


def check_after(recording: Recording, truth: Truth, prompts: list[list[int]], tolerance: Tolerance) -> Beat:
    """Is it the moved policy that samples in the next iteration?"""
    experience = recording.experiences[1]
    rows = answers_of(experience, prompts)
    moved = truth.passes(recording.steps[-1].after.adapter, rows, recording.cfg.temperature)
    found = cut(experience.behaviour_logprobs_BR, rows)
    return compare(
        "sync: log-probs of the next rollout", "pipeline/online.py, rollout.py", found, logprobs(moved), tolerance
    )


def rows_heard(heard: list[Heard]) -> Rows:
    """(prompt, answer) of every row of some micro-batches, in their order."""
    rows = []
    for call in heard:
        batch = call.batch
        for row in range(len(batch)):
            start, length = int(batch.prompt_lengths_B[row]), int(batch.response_lengths_B[row])
            ids = batch.tokens_BT[row, : start + length].tolist()
            rows.append((ids[:start], ids[start:]))
    return rows


def tokens_heard(call: Heard) -> Iterator[list[Token]]:
    """What the losses read of each row's tokens, all of it as the loop had it."""
    batch = call.batch
    for row, length in enumerate(batch.response_lengths_B.tolist()):
        columns = (
            call.logprobs_BR,
            call.values_BR,
            batch.old_logprobs_BR,
            batch.values_BR,
            batch.advantages_BR,
            batch.returns_BR,
            batch.weights_BR,
        )
        yield [Token(*numbers) for numbers in zip(*(column[row, :length].tolist() for column in columns), strict=True)]


def policy_loss(token: Token, cfg: PPOParams) -> Scalar:
    """One token's term of the policy's loss."""
    return naive_math.surrogate(token, cfg.clip, cfg.dual_clip)


def loss(token: Token, cfg: PPOParams) -> Scalar:
    """One token's term of the whole loss."""
    return policy_loss(token, cfg) + cfg.vf_coef * naive_math.value_error(token, cfg.clip_value)


@dataclass(frozen=True)
class _Recomputed:
    logprobs: list[list[float]]
    values: list[list[float]]
    gradients: dict[str, Tensor]


def _recompute(step: Step, truth: Truth, cfg: PPOParams) -> _Recomputed:
    """Forward and backward of one minibatch, row by row, at the weights that the step started from."""
    weights = _tracked(step.before)
    leaves = weights.named()
    gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    result = _Recomputed([], [], gradients)
    of_rows = [tokens for call in step.heard for tokens in tokens_heard(call)]
    total = sum(map(len, of_rows))
    for (prompt, answer), tokens in zip(rows_heard(step.heard), of_rows, strict=True):
        row = answer_pass(truth.causal, weights.adapter, prompt, answer, cfg.temperature)
        states_RH = row.states_RH.detach() if cfg.value_backprop == "detached" else row.states_RH
        values_R = weights.head(states_RH)
        result.logprobs.append(row.logprobs_R.tolist())
        result.values.append(values_R.tolist())
        row_loss: Scalar = 0.0
        for token, logprob, value in zip(tokens, row.logprobs_R.double(), values_R.double(), strict=True):
            row_loss = row_loss + loss(replace(token, logprob=logprob, value=value), cfg) / total
        found = torch.autograd.grad(row_loss, list(leaves.values()), allow_unused=True)
        for name, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                gradients[name] += gradient
    return result


def _tracked(weights: Weights) -> Weights:
    """The same weights, asking for gradients."""

    def asking(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    adapter: Adapter = {
        name: replace(pair, a_RI=asking(pair.a_RI), b_OR=asking(pair.b_OR)) for name, pair in weights.adapter.items()
    }
    return Weights(adapter, Head(asking(weights.head.weight_H), asking(weights.head.bias)))


def _minibatches(recording: Recording) -> Beat:
    """Every epoch takes every answer once, with the numbers that `evaluate` gave it."""
    name, module = "update: minibatches", "pipeline/update.py, batch.py"
    whole = Counter(_row_keys(recording.experiences[0]))
    per_epoch = len(recording.steps) // recording.cfg.epochs
    for epoch in range(recording.cfg.epochs):
        steps = recording.steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        heard = Counter(key for step in steps for call in step.heard for key in _row_keys(call.batch))
        if heard != whole:
            wrong = (heard - whole).total()
            found = (
                f"epoch {epoch + 1}: {wrong} of {heard.total()} rows are not those that `evaluate` made, or come twice"
            )
            return Beat(name, module, found, deviates=True)
    return Beat(name, module, "every answer once an epoch, its numbers unchanged", deviates=False)


def _row_keys(batch: Experience) -> list[tuple]:
    """All that a batch holds of each row, padding left out."""
    keys = []
    for row in range(len(batch)):
        prompt, answer = int(batch.prompt_lengths_B[row]), int(batch.response_lengths_B[row])
        widths = {"BT": prompt + answer, "BR": answer}
        key = []
        for field in fields(Experience):
            numbers = getattr(batch, field.name)[row]
            axes = field.name.rpartition("_")[2]
            key.append(tuple(numbers[: widths[axes]].tolist()) if axes in widths else numbers.item())
        keys.append(tuple(key))
    return keys


def _losses(recording: Recording) -> list[Beat]:
    """The sums that the objective gave of each micro-batch, and the mean that the update logged."""
    cfg, steps = recording.cfg, recording.steps
    terms = {
        "policy_loss": lambda token: policy_loss(token, cfg),
        "value_loss": lambda token: naive_math.value_error(token, cfg.clip_value),
        "loss": lambda token: loss(token, cfg),
    }
    beats = []
    for name, term in terms.items():
        found, expected = [], []
        for step in steps:
            count = sum(len(tokens) for call in step.heard for tokens in tokens_heard(call))
            # sums over the number of tokens, so that the tolerance is one of a token's loss
            found.append([call.sums[name] / count for call in step.heard])
            expected.append([sum(term(t) for row in tokens_heard(call) for t in row) / count for call in step.heard])
        title = f"update: {name.replace('_', ' ')}"
        beats.append(
            compare(title, "pipeline/objectives/online.py", found, expected, ARITHMETIC, ("step", "micro-batch"))
        )
        means = [sum(of_step) for of_step in expected]
        logged = [[recording.stats[0][name]]]
        mean = compare(title, "pipeline/update.py", logged, [[sum(means) / len(means)]], ARITHMETIC, ("loss", "mean"))
        if mean.deviates and not beats[-1].deviates:
            beats[-1] = replace(mean, name="update: loss divided by tokens", found=f"{name} logged: {mean.found}")
    return beats


def _gradients(steps: list[Step], recomputed: list[dict[str, Tensor]], limit: float) -> Beat:
    """Gradients before clipping, matrix by matrix; a difference is relative to the matrix's own gradient."""
    name, module = "update: gradients", "pipeline/update.py, roles.py, tensors.py"
    worst, worst_of, empty = 0.0, "", []
    ratios = []
    for number, (step, expected) in enumerate(zip(steps, recomputed, strict=True)):
        overall = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
        for key, right in expected.items():
            mine = step.gradients[key]
            size = max(float(right.norm()), 1e-3 * overall)
            error = float((mine - right).norm()) / size
            if float(right.norm()) > 1e-3 * overall and not mine.any():
                empty.append(key)
            elif float(right.norm()) > 1e-3 * overall:
                ratios.append(float((mine * right).sum() / (right**2).sum()))
            if not error <= worst:
                worst, worst_of = error, f"{key} in step {number + 1}"
    if worst <= limit:
        return Beat(name, module, f"within {worst:.1e} (allowed {limit:.0e})", deviates=False)
    found = f"{worst_of} is {worst:.1e} of its size off"
    hint = ""
    if empty:
        hint = f"no gradient reaches {len(set(empty))} matrices, the first is {empty[0]}"
    elif ratios and max(ratios) - min(ratios) < 0.05 * abs(ratios[0]):
        hint = f"all gradients are {ratios[0]:.3g} times the right ones: the divisor or a sign"
    return Beat(name, module, found, deviates=True, hint=hint)


def _optimizer(recording: Recording) -> Beat:
    """Clipping by group and Adam, from the gradients that the loop had."""
    name, module = "update: optimizer step", "pipeline/update.py, stages/ppo.py"
    cfg, adam = recording.cfg, naive_math.Adam()
    for number, step in enumerate(recording.steps):
        groups = [
            {key: g for key, g in step.gradients.items() if key.startswith("value_head") == of_value}
            for of_value in (False, True)
        ]
        clipped = {}
        for group in groups:
            factor = naive_math.clip_factor(list(group.values()), cfg.max_grad_norm)
            clipped |= {key: gradient * factor for key, gradient in group.items()}
        changes = adam.step(clipped, lr=1.0)
        before, after = step.before.named(), step.after.named()
        for key, change in changes.items():
            peak = cfg.value_lr if key.startswith("value_head") else cfg.lr
            expected = change * naive_math.learning_rate(peak, cfg.warmup_steps, number)
            moved = after[key].double() - before[key].double()
            # float32 weights cannot take a step more finely than their own rounding
            grain = 1e-7 * float(before[key].norm())
            size = float(expected.norm())
            error = float((moved - expected).norm())
            if not error <= STEP_LIMIT * size + grain:
                share = float(moved.norm()) / size if size else float("inf")
                found = f"step {number + 1}, {key}: moved {share:.3g} times as far as Adam would have"
                hint = "it is not trained" if not moved.any() else ""
                return Beat(name, module, found, deviates=True, hint=hint)
    return Beat(
        name, module, f"Adam's, clipped at {cfg.max_grad_norm:g}, in {len(recording.steps)} steps", deviates=False
    )
