"""What the rungs say together: is it the code, a setting, the reward model, or nothing; and what to do next."""

from dataclasses import dataclass

from pipeline.diagnosis.ladder import Climb, still_fault
from pipeline.params.evaluate import EvaluateParams

CODE, SETTING, SOUND = 3, 2, 0
HELD = 0.25  # of the KL without a price or clip: below, the price or the clip is what holds the policy
HARDLY_MOVED = 0.02  # nats per answer
DECISIVE = tuple(f"ppo.{key}" for key in ("lr", "clip", "kl_coef", "temperature", "gamma", "lam", "epochs"))
"""Parameters whose unusual values alone make a run suspect."""


@dataclass(frozen=True)
class Verdict:
    """status: the exit status. headline: one sentence. next_steps: what to do, in order. notes: what else was seen."""

    status: int
    headline: str
    next_steps: list[str]
    notes: list[str]


def judge(found: Climb, evaluate: EvaluateParams, warnings: list[str]) -> Verdict:
    """Code before settings before the reward model: each makes what comes after it meaningless.

    Args:
        warnings: of `check_params`, each of which starts with its key.
    """
    decisive = [warning for warning in warnings if warning.split()[0] in DECISIVE]
    notes = [warning for warning in warnings if warning not in decisive]
    notes += [] if found.sanity is None else found.sanity.doubts
    if found.deviating:
        first = found.deviating[0]
        steps = [f"Look at {first.module}: {first.name}, {first.found}."]
        if first.hint:
            steps.append(f"It looks as if {first.hint}." if " " in first.hint else first.hint)
        rest = [beat.name for beat in found.deviating[1:]]
        if rest:
            steps.append(
                f"Then run this again. Also off: {', '.join(rest)}; each was computed from what the loop had before it, "
                "so these are faults of their own or of the same function."
            )
        return Verdict(CODE, f"FAULTY CODE: the first beat that deviates is `{first.name}`.", steps, notes)
    fault = still_fault(found)
    if fault:
        steps = [f"With a learning rate of 1e-7: {fault}. Look at pipeline/update.py and at pipeline/loop.py."]
        return Verdict(CODE, "FAULTY CODE: the policy moves where it may not, or not where it must.", steps, notes)
    settings = setting_faults(found, decisive)
    if found.cfg.temperature != evaluate.temperature:
        settings.append(
            f"ppo.temperature is {found.cfg.temperature:g} but evaluate.temperature {evaluate.temperature:g}: the policy "
            "is trained on one distribution and shown with another. Set both alike."
        )
    rewards = [] if found.sanity is None else found.sanity.faults
    steps = [*settings, *(_reward_steps(rewards) if rewards else [])]
    if settings:
        return Verdict(SETTING, "BAD SETTINGS: the code computes what it should.", steps, notes)
    if rewards:
        return Verdict(SETTING, "REWARD MODEL: code and settings are sound, what they climb is not.", steps, notes)
    return Verdict(SOUND, "NOTHING DEVIATES: code, settings and reward model look sound.", _next(found), notes)


def setting_faults(found: Climb, warnings: list[str]) -> list[str]:
    """One sentence for each setting that stands in the way: what is seen, and what to change; then `warnings` of other keys."""
    cfg, run = found.cfg, found.as_set
    faults = []
    if run.trouble or run.falls:
        seen = run.trouble or f"the score falls by {-run.rise:.2f}"
        calm = found.gentle is not None and not found.gentle.trouble and not found.gentle.falls
        faults.append(
            f"ppo.lr is {cfg.lr:g}: {seen}. With {cfg.lr / 10:g} that does not happen: lower it."
            if calm
            else f"As set: {seen}; with a tenth of the learning rate too. Lower ppo.lr further, ppo.epochs or ppo.vf_coef."
        )
    elif found.pure.kl > HARDLY_MOVED and run.kl < HELD * found.pure.kl:
        faults.append(
            f"ppo.kl_coef is {cfg.kl_coef:g}: the policy comes to {run.kl:.2g} nats, without a price to {found.pure.kl:.2g}. Lower it."
        )
    elif found.wide is not None and found.wide.kl > HARDLY_MOVED and run.kl < HELD * found.wide.kl:
        faults.append(
            f"ppo.clip is {cfg.clip:g}: the policy comes to {run.kl:.2g} nats, with clip 10 to {found.wide.kl:.2g}. Widen it."
        )
    elif abs(run.kl) < HARDLY_MOVED:
        faults.append(f"ppo.lr is {cfg.lr:g}: after {run.steps:.0f} steps KL is {run.kl:.1g} nats. Raise it.")
    by_key = {
        sentence.split()[0]: sentence for sentence in reversed([*faults, *warnings])
    }  # of a key the first is kept
    return list(reversed(by_key.values()))


def _reward_steps(faults: list[str]) -> list[str]:
    return [f"Reward model: {fault}." for fault in faults] + [
        "Look at metrics/reward.json: accuracy beside length alone and a bag of words. At chance: more or cleaner pairs, "
        "more epochs, another reward.lr. If it was good there, artifacts/reward is not what was trained: `dvc repro -f reward`."
    ]


def _next(found: Climb) -> list[str]:
    steps = ["Run longer: `dvc repro`, then look at score, KL and length in `dvc plots show` and in MLflow."]
    if not found.as_set.rises:
        steps.append(
            "In this budget the score rises by less than its noise; that better answers become likelier is what "
            "so few can show. If a whole run is flat too: more answers an iteration (ppo.rollout_size), or a stronger reward model."
        )
    return steps
