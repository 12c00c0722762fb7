"""Which rules read which stage."""

from collections.abc import Mapping

from pipeline.health.answers import RULES as ANSWERS
from pipeline.health.curve import Curve, Row
from pipeline.health.findings import Finding, Watcher
from pipeline.health.learning import RULES as LEARNING
from pipeline.health.supervised import ACCURACY_AT_CHANCE, BEHIND_BASELINE, LOSS_RISES, NO_GAIN, NOT_FINITE

RANKING = (NOT_FINITE, LOSS_RISES, ACCURACY_AT_CHANCE)
STEP_RULES = {
    "sft": (NOT_FINITE, LOSS_RISES),
    "reward": RANKING,
    "judge": RANKING,
    "ppo": (NOT_FINITE, *LEARNING, *ANSWERS),
    "dpo": RANKING,
}
RESULT_RULES = {"sft": (NO_GAIN,), "reward": (BEHIND_BASELINE,), "judge": (BEHIND_BASELINE,)}


def step_watcher(stage: str, params: Mapping[str, str]) -> Watcher:
    """A watcher for a stage's curve; one without rules for a stage that has none."""
    return Watcher(stage, STEP_RULES.get(stage, ()), params)


def find_in_curve(stage: str, curve: Curve, params: Mapping[str, str]) -> list[Finding]:
    """All findings of a whole curve, in the order in which they appeared."""
    watcher = step_watcher(stage, params)
    return [finding for row in curve for finding in watcher.step(row)]


def find_in_result(stage: str, result: Row, step: int, params: Mapping[str, str]) -> list[Finding]:
    """The findings of what a stage writes to metrics/STAGE.json after `step` steps."""
    return Watcher(stage, RESULT_RULES.get(stage, ()), params).step({**result, "step": step})
