"""The rungs: what is done, what was found, and what each says for itself. `verdict.py` reads them together."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.data.records import Pair
from pipeline.diagnosis.beats import check_beats
from pipeline.diagnosis.compare import Beat
from pipeline.diagnosis.learning import ShortRun, short_run
from pipeline.diagnosis.opening import Case
from pipeline.diagnosis.sanity import Sanity, check_reward_model
from pipeline.errors import TrainingError
from pipeline.params.ppo import PPOParams
from pipeline.progress import ProgressBar

WIDE_CLIP = 10.0
TINY_LR = 1e-7
STILL = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats that a policy may seem to have moved by rounding alone: per token in an update, per answer to the SFT model."""

Word = Literal["ok", "unclear", "setting", "reward model", "CODE", "left out"]


@dataclass(frozen=True)
class Budget:
    """How much is done.

    rows: answers whose every number is computed a second time.
    answers, iterations: of each short run; `still_iterations` of the one whose weights must not move.
    pairs: at most so many for the reward model.
    """

    rows: int = 8
    answers: int = 16
    iterations: int = 5
    still_iterations: int = 2
    pairs: int = 40


@dataclass(frozen=True)
class Rung:
    """One line of the table."""

    name: str
    done: str
    found: str
    word: Word


@dataclass(frozen=True)
class Climb:
    """Everything that was found. Runs are None where faulty code made them pointless."""

    cfg: PPOParams
    beats: list[Beat]
    as_set: ShortRun | None
    pure: ShortRun | None
    wide: ShortRun | None
    still: ShortRun | None
    gentle: ShortRun | None
    sanity: Sanity | None
    limit: float
    """Of `STILL`."""

    @property
    def deviating(self) -> list[Beat]:
        """In the order of the loop."""
        return [beat for beat in self.beats if beat.deviates]


def climb(case: Case, pairs: list[Pair], budget: Budget, bar: ProgressBar) -> Climb:
    """Every rung; the short runs only where the code is sound, as a faulty loop says nothing about settings."""
    cfg = case.cfg
    try:
        beats = check_beats(case, budget.rows)
    except TrainingError as error:  # at a learning rate of ours, so no setting can be the cause
        beats = [Beat("the loop stops by itself", "pipeline/evaluation.py, update.py", str(error), deviates=True)]
    bar.advance(0)
    model, sanity = case.loop.reward_model, None
    if model is not None:
        sanity = check_reward_model(model, pairs[: budget.pairs], case.tokenizer, case.loop.microbatch_tokens)
    limit = STILL[case.loop.policy.backbone.head_VH.dtype]
    if any(beat.deviates for beat in beats):
        return Climb(cfg, beats, None, None, None, None, None, sanity, limit)
    small = _small(cfg, min(budget.answers, len(case.questions) * cfg.answers_per_prompt))
    done = 0

    def run(iterations: int, **changes: float) -> ShortRun:
        def tick() -> None:
            nonlocal done
            done += 1
            bar.advance(done)

        return short_run(case, small.model_copy(update=changes), iterations, tick)

    as_set = run(budget.iterations)
    pure = run(budget.iterations, kl_coef=0.0)
    wide = run(budget.iterations, clip=WIDE_CLIP) if cfg.algorithm != "reinforce" else None
    still = run(budget.still_iterations, lr=TINY_LR)
    gentle = run(budget.iterations, lr=cfg.lr / 10) if as_set.trouble or as_set.falls else None
    return Climb(cfg, beats, as_set, pure, wide, still, gentle, sanity, limit)


def rungs(found: Climb) -> list[Rung]:
    """The table's lines."""
    if found.as_set is None:
        skipped = [
            Rung(name, done, "not run: first the code", "left out")
            for name, done in (("2 pure reward", "kl_coef 0"), ("3 wide clip", "clip 10"), ("4 still", "lr 1e-7"))
        ]
        return [_beats(found), *skipped, *_sanity(found)]
    lines = [
        _beats(found),
        _run("as set", f"your settings, {len(found.as_set.stats)} iterations", found.as_set),
        _run("2 pure reward", "kl_coef 0", found.pure),
    ]
    if found.wide is None:
        lines.append(Rung("3 wide clip", "clip 10", f"{found.cfg.algorithm} does not clip", "left out"))
    else:
        lines.append(_run("3 wide clip", "clip 10", found.wide))
    lines.append(_still(found))
    if found.gentle is not None:
        lines.append(_run("gentle", f"lr {found.gentle.cfg.lr:g}, a tenth of yours", found.gentle))
    return [*lines, *_sanity(found)]


def _beats(found: Climb) -> Rung:
    done = f"{len(found.beats)} beats computed a second time"
    if not found.deviating:
        return Rung("1 each beat", done, "none deviates", "ok")
    first = found.deviating[0]
    others = f" (and {len(found.deviating) - 1} more)" if found.deviating[1:] else ""
    return Rung("1 each beat", done, f"first to deviate: {first.name}{others}", "CODE")


def _run(name: str, done: str, run: ShortRun) -> Rung:
    if run.trouble or run.falls:
        found = f"{run.summary()}. {run.trouble or 'the score falls'}" if not run.stopped else run.stopped
        return Rung(name, done, found, "setting")
    if run.rises:
        return Rung(name, done, f"{run.summary()}; it rises", "ok")
    if run.gain > 0:
        return Rung(name, done, f"{run.summary()}; better answers become likelier", "ok")
    return Rung(name, done, f"{run.summary()}; better answers do not become likelier", "unclear")


def _still(found: Climb) -> Rung:
    fault = still_fault(found)
    run, done = found.still, f"lr {TINY_LR:g}: nothing may move"
    if fault:
        return Rung("4 still", done, fault, "CODE")
    noise = abs(run.scores[-1] - run.scores[0])
    return Rung("4 still", done, f"weights moved {run.moved:.0e}, KL {run.kl:.0e}; score's noise {noise:.2f}", "ok")


def still_fault(found: Climb) -> str:
    """What is wrong where the learning rate is tiny; "" where nothing is."""
    run = found.still
    if run.stopped:
        return run.stopped
    allowed = 10 * TINY_LR * run.steps + 1e-6  # Adam's steps are of about the learning rate's size; and rounding
    if run.moved > allowed:
        return f"a weight moved {run.moved:.1e} in {run.steps:.0f} steps of at most {TINY_LR:g}"
    if run.moved == 0:
        return f"no weight moved at all in {run.steps:.0f} steps"
    update = max(one["update_k3"] for one in run.stats)
    if not update <= found.limit:
        return f"{update:.2g} nats per token between old and new policy, though no weight moved to speak of"
    if not abs(run.kl) <= found.limit:
        return f"KL of {run.kl:.2g} nats to the SFT model, though no weight moved to speak of"
    return ""


def _sanity(found: Climb) -> list[Rung]:
    if found.sanity is None:
        return [Rung("5 reward model", "ppo.reward does not use one", "", "left out")]
    means = ", ".join(f"{kind.name} {kind.mean:.1f}" for kind in found.sanity.kinds)
    above = ", ".join(f"{kind.name} {kind.chosen_above:.0%}" for kind in found.sanity.kinds[1:])
    done = f"answers to {found.sanity.pairs} development prompts"
    word: Word = "reward model" if found.sanity.faults else "ok"
    return [Rung("5 reward model", done, f"scores: {means}. Chosen is above: {above}", word)]


def _small(cfg: PPOParams, rows: int) -> PPOParams:
    """The user's settings on few answers: whole groups; as many optimizer steps an iteration as set, at most four."""
    groups = max(2, rows // cfg.answers_per_prompt)
    steps = min(4, math.ceil(cfg.rollout_size / cfg.minibatch_size))
    size = groups * cfg.answers_per_prompt
    return cfg.model_copy(update={"rollout_size": size, "minibatch_size": max(1, math.ceil(size / steps))})
