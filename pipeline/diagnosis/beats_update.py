"""The third and fourth beat: minibatches, losses, gradients, the optimizer's step, and the policy that samples next."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace

import torch
from torch import Tensor

from pipeline.batch import Experience
from pipeline.diagnosis import naive_math
from pipeline.diagnosis.beats_rollout import answers_of, cut, logprobs
from pipeline.diagnosis.compare import ARITHMETIC, Beat, Precision, Tolerance, compare
from pipeline.diagnosis.naive_update import loss, loss_terms, recompute, rows_heard, tokens_heard
from pipeline.diagnosis.recording import Recording, Step
from pipeline.diagnosis.truth import Truth

STEPS_WITH_GRADIENT = 2  # the first, whose ratios are all 1, and the second, whose are not
STEP_LIMIT = 1e-3  # of a step's own size: float32 moments against float64


def check_update(recording: Recording, truth: Truth, precision: Precision) -> list[Beat]:
    """All beats of `update`, in its order."""
    tolerance, gradient = precision.forward, precision.gradient
    steps = recording.steps[:STEPS_WITH_GRADIENT]
    recomputed = [recompute(step, truth, recording.cfg) for step in steps]
    heard = [call for step in steps for call in step.heard]
    found = [row for call in heard for row in cut(call.logprobs_BR, rows_heard([call]))]
    module = "pipeline/roles.py, update.py, online.py"
    beats = [
        _minibatches(recording),
        compare("update: log-probs", module, found, [row for again in recomputed for row in again.logprobs], tolerance),
    ]
    if steps[0].before.head is not None:
        values = [row for call in heard for row in cut(call.values_BR, rows_heard([call]))]
        right = [row for again in recomputed for row in again.values]
        beats.append(compare("update: values", module, values, right, tolerance))
    return [
        *beats,
        *_losses(recording),
        _gradients("update: gradients", steps[0], recomputed[0].gradients, gradient),
        _optimizer(recording),
        _gradients("update: gradients of the second step", steps[1], recomputed[1].gradients, gradient),
    ]


def check_after(recording: Recording, truth: Truth, tolerance: Tolerance) -> list[Beat]:
    """Is it the moved policy that samples in the next iteration, and what does a nat cost then?"""
    cfg, experience = recording.cfg, recording.experiences[1]
    rows = answers_of(recording, 1)
    moved = truth.passes(recording.steps[-1].after.adapter, rows, cfg.temperature)
    found = cut(experience.behaviour_logprobs_BR, rows)
    module = "pipeline/online.py, rollout.py"
    beats = [compare("sync: log-probs of the next rollout", module, found, logprobs(moved), tolerance)]
    if cfg.kl_target is not None:
        first, second = recording.stats
        kl, answers = first["kl_per_sequence_k1"], len(recording.experiences[0])
        right = naive_math.next_kl_coef(first["kl_coef"], kl, cfg.kl_target, answers, cfg.kl_horizon)
        beats.append(
            compare(
                "sync: kl_coef", "pipeline/kl_control.py", [[second["kl_coef"]]], [[right]], ARITHMETIC, ("kl_coef", "")
            )
        )
    return beats


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
    """The sums that the objective gave of each micro-batch, and the means that the update logged."""
    cfg = recording.cfg
    calls = [step.heard for step in recording.steps] + [recording.stressed]
    terms = {name: term for name, (_, term) in loss_terms(cfg).items()} | {"loss": lambda token: loss(token, cfg)}
    beats = []
    for name, term in terms.items():
        found, expected = [], []
        for heard in calls:
            count = sum(len(row) for call in heard for row in tokens_heard(call))
            # over the number of tokens, so that the tolerance is one of a token's loss
            found.append([call.sums["differentiable" if name == "loss" else name] / count for call in heard])
            expected.append([sum(term(t) for row in tokens_heard(call) for t in row) / count for call in heard])
        title = f"update: {name.replace('_', ' ')}"
        beat = compare(title, "pipeline/objectives/online.py", found, expected, ARITHMETIC, ("step", "micro-batch"))
        means = [sum(of_step) for of_step in expected[:-1]]
        if not beat.deviates and not (name == "loss" and cfg.ptx_coef):  # that of demonstrations is in the logged one
            logged, right = [[recording.stats[0][name]]], [[sum(means) / len(means)]]
            beat = replace(
                compare(title, "pipeline/update.py", logged, right, ARITHMETIC, ("update", "mean per token")),
                name=title,
            )
        beats.append(beat)
    return beats


def _gradients(name: str, step: Step, expected: dict[str, Tensor], tolerance: Tolerance) -> Beat:
    """Gradients before clipping, matrix by matrix; a difference is relative to the matrix's own gradient.

    A matrix to which no gradient comes is a fault also where the second computation, which runs the same base layers,
    gets none either.
    """
    module = "pipeline/update.py, roles.py, lora.py, quantization.py"
    empty = [key for key, gradient in step.gradients.items() if not gradient.any()]
    if empty:
        found = f"{len(empty)} of {len(expected)} tensors get none, the first is {empty[0]}"
        return Beat(name, module, found, deviates=True, hint="no gradient reaches them")
    floor = 1e-3 * _size(expected.values())
    errors = {
        key: float((step.gradients[key] - right).norm()) / max(float(right.norm()), floor)
        for key, right in expected.items()
    }
    worst = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    overall = _size(step.gradients[key] - right for key, right in expected.items()) / _size(expected.values())
    if errors[worst] <= tolerance.largest and overall <= tolerance.typical:
        found = f"within {overall:.1e} in all (allowed {tolerance.typical:.0e}), {errors[worst]:.1e} in one matrix"
        return Beat(name, module, found, deviates=False)
    factors = [
        float((step.gradients[key] * right).sum() / (right**2).sum())
        for key, right in expected.items()
        if float(right.norm()) > floor
    ]
    hint = ""
    if max(factors) - min(factors) < 0.05 * abs(factors[0]):
        hint = f"all are {factors[0]:.3g} times the right ones: the divisor, or a sign"
    return Beat(
        name, module, f"{overall:.1e} off in all, {worst} {errors[worst]:.1e} of its size", deviates=True, hint=hint
    )


def _size(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


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
