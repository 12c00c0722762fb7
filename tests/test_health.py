"""Health rules on invented curves: each speaks at the step worked out by hand, and none on a curve that is well."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from health_table import PARTS, tables

from pipeline.files import write_tsv
from pipeline.health.curve import read_curve, rise
from pipeline.health.findings import KEY, Rule, Watcher
from pipeline.health.rules import RESULT_RULES, STEP_RULES, find_in_curve, find_in_result
from pipeline.lineage import flattened
from pipeline.params.section import read_params

Figure = float | Callable[[int], float]
HEALTHY: dict[str, Figure] = {
    "score_mean": lambda step: -1 + 0.25 * step + 0.05 * (-1) ** step,
    "score_std": 3.0,
    "kl_per_sequence_k1": lambda step: float(step),
    "kl_per_token_k1": lambda step: 0.04 * step,
    "entropy": lambda step: 3 - 0.1 * step,
    "advantage_mean": -0.2,
    "advantage_positive_share": 0.45,
    "answers_without_advantage": 0.0,
    "explained_variance": lambda step: 0.05 * step,
    "length_mean": lambda step: 40 - step,
    "end_token_rate": 0.95,
    "end_token_only_rate": 0.0,
    "distinct_2": 0.8,
    "loss": 0.7,
    "policy_loss": 0.0,
    "value_loss": 1.4,
    "clip_fraction": 0.06,
    "non_finite_steps": 0.0,
    "update_steps": 4.0,
    "update_steps_skipped": 0.0,
}


def curve_of(steps: int, figures: dict[str, Figure]) -> list[dict[str, float | str]]:
    return [
        {"step": step, **{name: figure(step) if callable(figure) else figure for name, figure in figures.items()}}
        for step in range(steps)
    ]


def ppo_curve(**changes: Figure) -> list[dict[str, float | str]]:
    """Twelve healthy iterations of PPO, with changes."""
    return curve_of(12, HEALTHY | changes)


def from_step(when: int, before: float, after: float) -> Callable[[int], float]:
    return lambda step: after if step >= when else before


def wiggle(middle: float) -> Callable[[int], float]:
    return lambda step: middle + 0.01 * (-1) ** step


FLAT = {"score_mean": wiggle(0.0)}
RANKING = {"loss": 0.69, "accuracy": 0.8, "lr_adapter": lambda step: 1 - step / 30, "non_finite_steps": 0.0}
NAN, INF = float("nan"), float("inf")

# stage, curve, and per rule the step at which it speaks and the numbers that it gives. "Lately" is the mean of three rows.
CASES: list[tuple[str, list, dict[str, tuple[int, str]]]] = [
    ("ppo", ppo_curve(value_loss=from_step(5, 1.4, NAN)), {"not-finite": (5, "not finite: value_loss")}),
    ("ppo", ppo_curve(ratio_max=from_step(5, 1.4, INF)), {"not-finite": (5, "not finite: ratio_max")}),
    ("sft", curve_of(9, {"loss": 3.0, "non_finite_steps": from_step(8, 0, 1)}), {"not-finite": (8, "in 100% of the")}),
    ("ppo", ppo_curve(kl_per_sequence_k1=lambda step: 0.5 + step), {"kl-at-start": (0, "0.5 nats per answer")}),
    ("ppo", ppo_curve(kl_per_sequence_k1=lambda step: -3.0 if step == 9 else step), {"kl-negative": (9, "reads -3 nats")}),
    ("ppo", ppo_curve(kl_per_token_k1=from_step(6, 0.2, 0.9)), {"kl-spike": (6, "from 0.2 to 0.9")}),
    # lately 25 at step 6, which is not above 25, and 30 at step 7
    ("ppo", ppo_curve(kl_per_sequence_k1=lambda step: 5.0 * step), {"over-optimisation": (7, "at 30 nats")}),
    ("ppo", ppo_curve(**FLAT, kl_per_sequence_k1=lambda step: 0.02 * step), {"policy-still": (7, "0.12 nats per answer")}),
    ("ppo", ppo_curve(**FLAT), {"score-flat": (7, "at 6 nats per answer")}),
    ("ppo", ppo_curve(score_mean=lambda step: -1 - 0.25 * step), {"score-flat": (7, "-1.38 in the first 4 iterations, -2.38")}),
    # a critic that warms up alone leaves no policy loss: five of twelve rows are too few
    ("ppo", [row if row["step"] >= 7 else {name: row[name] for name in row if name != "policy_loss"} for row in ppo_curve(**FLAT)], {}),
    ("ppo", ppo_curve(**FLAT, score_std=0.02), {"scores-without-spread": (2, "is 0.02, around a mean of 0.01"), "score-flat": (7, "")}),
    ("ppo", ppo_curve(**FLAT, answers_without_advantage=0.75), {"scores-without-spread": (3, "75% of the answers"), "score-flat": (7, "")}),
    # all answers are right in the end: the spread is gone, and that is well
    ("ppo", ppo_curve(score_mean=from_step(6, 0.2, 1.0), score_std=from_step(6, 0.4, 0.0)), {}),
    ("ppo", ppo_curve(advantage_positive_share=0.0, advantage_mean=-2.0), {"advantages-negative": (2, "mean -2")}),
    # 0.8 0.8 0.4 and 0.8 0.4 0.4 are not below 0.48 on average
    ("ppo", ppo_curve(distinct_2=from_step(6, 0.8, 0.4)), {"repeated-text": (8, "from 80% to 40%")}),
    # 40 40 10 and 40 10 10 are not below 20 on average
    ("ppo", ppo_curve(length_mean=from_step(5, 40, 10)), {"length-collapse": (7, "10 tokens, 40 at the start")}),
    ("ppo", ppo_curve(end_token_only_rate=from_step(5, 0.0, 0.36)), {"length-collapse": (5, "12% of them a bare end token")}),
    ("ppo", ppo_curve(length_mean=from_step(5, 40, 100)), {"length-blow-up": (7, "100 tokens, 40 at the start")}),
    # 5% 5% 65% are cut, then 5% 65% 65%
    ("ppo", ppo_curve(end_token_rate=from_step(5, 0.95, 0.35)), {"length-blow-up": (6, "45% are cut, 5% at the start")}),
    ("ppo", ppo_curve(end_token_rate=0.3), {"answers-cut": (0, "70% of the SFT model's answers")}),
    # 3 3 0.5 and 3 0.5 0.5 are not below 0.75 on average
    ("ppo", ppo_curve(entropy=from_step(5, 3.0, 0.5)), {"entropy-collapse": (7, "from 3 to 0.5 nats")}),
    ("ppo", ppo_curve(clip_fraction=0.4), {"clipping": (3, "40% of the tokens")}),
    ("ppo", ppo_curve(update_steps=1.0, update_steps_skipped=3.0), {"updates-cut-short": (3, "75% of the optimizer steps")}),
    ("ppo", ppo_curve(explained_variance=-0.5), {"critic-misleads": (4, "-0.5, below 0 for 5")}),
    # with k steps of ten at 3 the mean has risen by k / 10, of which the one leap makes a standard error of
    # sqrt(2 * (1 / 18 / 2) / 10) = 0.0745: three steps are above three of them, two are not
    ("sft", curve_of(40, {"loss": from_step(25, 2.0, 3.0)}), {"loss-rises": (27, "loss 2 over 10 steps, 2.3")}),
    # 1 - step / 30 is below one half from step 16 on
    ("reward", curve_of(30, RANKING | {"accuracy": 0.5}), {"accuracy-at-chance": (16, "50% of the training pairs")}),
    ("judge", curve_of(30, RANKING | {"accuracy": 0.5, "lr_adapter": 1.0}), {}),
    ("dpo", curve_of(30, RANKING | {"accuracy": 0.5}), {"accuracy-at-chance": (16, "50% of the training pairs")}),
]  # fmt: skip
RESULTS = [
    ("sft", {"development_loss_before": 3.5, "development_loss": 3.6}, {"no-gain": "3.5 before, 3.6 after"}),
    ("sft", {"development_loss_before": 3.5, "development_loss": 3.4}, {}),
    ("judge", {"development_accuracy": 0.6, "development_accuracy_length_alone": 0.4, "development_accuracy_bag_of_words": 0.7}, {"behind-baseline": "60% of the development pairs; a bag of words in 70%"}),
    ("reward", {"development_accuracy": 0.8, "development_accuracy_length_alone": 0.4, "development_accuracy_bag_of_words": 0.7}, {}),
]  # fmt: skip


def all_rules() -> list[Rule]:
    return list({rule.name: rule for rules in PARTS.values() for rule in rules}.values())


@pytest.mark.parametrize(
    ("stage", "curve", "expected"), CASES, ids=lambda value: "+".join(value) if isinstance(value, dict) else ""
)
def test_a_curve_provokes_its_rule_and_no_other(stage: str, curve: list, expected: dict[str, tuple[int, str]]) -> None:
    """Reports huggingface/trl#522 and #487, and hiyouga/LLaMA-Factory#803 are among the cases."""
    found = {finding.rule: finding for finding in find_in_curve(stage, curve, {})}
    assert {name: finding.step for name, finding in found.items()} == {
        name: step for name, (step, _) in expected.items()
    }
    for name, (_, numbers) in expected.items():
        assert numbers in found[name].seen


@pytest.mark.parametrize(("stage", "result", "expected"), RESULTS)
def test_a_result_provokes_its_rule(stage: str, result: dict[str, float], expected: dict[str, str]) -> None:
    found = find_in_result(stage, result, 44, {})
    assert [(finding.rule, finding.step) for finding in found] == [(name, 44) for name in expected]
    assert all(numbers in finding.seen for finding, numbers in zip(found, expected.values(), strict=True))


def test_every_rule_has_a_case() -> None:
    """Out of memory has tests of its own: no curve shows it."""
    provoked = {name for *_, expected in CASES + RESULTS for name in expected}
    watched = {rule.name for rules in (*STEP_RULES.values(), *RESULT_RULES.values()) for rule in rules}
    assert provoked == watched == {rule.name for rule in all_rules()} - {"out-of-memory"}


def test_a_healthy_curve_gives_nothing() -> None:
    assert find_in_curve("ppo", ppo_curve(), {}) == []
    assert find_in_curve("sft", curve_of(60, {"loss": lambda step: 3 - step / 50 + 0.3 * (-1) ** step}), {}) == []
    assert find_in_curve("reward", curve_of(30, RANKING), {}) == []


@pytest.mark.parametrize("stage", STEP_RULES)
def test_the_committed_run_gives_nothing(stage: str) -> None:
    """A run that got better on every measure: docs/demo.md."""
    assert find_in_curve(stage, read_curve(ROOT / f"plots/{stage}.tsv"), {}) == []


def test_figures_that_an_algorithm_lacks_are_no_fault() -> None:
    """Without a critic there is no explained variance; an older table lacks what was added since."""
    for name in HEALTHY:
        curve = [{key: value for key, value in row.items() if key != name} for row in ppo_curve()]
        assert find_in_curve("ppo", curve, {}) == []
    assert find_in_curve("warmup", ppo_curve(value_loss=NAN), {}) == []


def test_a_finding_is_said_once_and_again_only_if_it_went_away() -> None:
    """Absent for two steps it flickers, absent for three it was gone."""
    rule = Rule("up", lambda curve: "up" if curve[-1]["x"] else None, "cause", "change")
    watcher = Watcher("ppo", [rule], {})
    said = [step for step, x in enumerate((0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1)) if watcher.step({"step": step, "x": x})]
    assert said == [1, 9]


def test_the_table_in_plots_gives_the_same_findings(tmp_path: Path) -> None:
    """So that a report can mark them from plots/STAGE.tsv."""
    curve = ppo_curve(value_loss=from_step(5, 1.4, NAN), entropy=from_step(5, 3.0, 0.5))
    del curve[3]["score_std"]
    curve[4]["note"] = 'a "word"'
    write_tsv(tmp_path / "ppo.tsv", curve)
    assert find_in_curve("ppo", read_curve(tmp_path / "ppo.tsv"), {}) == find_in_curve("ppo", curve, {}) != []


def test_no_row_makes_a_rule_raise() -> None:
    dice = random.Random(0)
    names = [*HEALTHY, *RANKING, "development_loss", "development_loss_before", "development_accuracy"]
    values = [NAN, INF, -INF, 0.0, -0.0, -1.0, 1.0, 3.0, 1e308, -1e308, 5e-324, 0, 7, True, "text", None, {"a": 1}]
    for _ in range(150):
        curve = [
            {"step": step, **{name: dice.choice(values) for name in dice.sample(names, dice.randrange(len(names)))}}
            for step in range(dice.randrange(1, 30))
        ]
        for stage in STEP_RULES:
            findings = find_in_curve(stage, curve, {}) + find_in_result(stage, curve[-1], 1, {})
            assert all(finding.seen and finding.cause and finding.change for finding in findings)


def test_the_noise_of_a_rise_is_that_of_neighbours() -> None:
    """Differences 1, -1 and 1, -1: variance 1/2, so the error of a difference of two means of three is sqrt(2 * 0.5 / 3)."""
    risen, error = rise([0.0, 1.0, 0.0], [4.0, 5.0, 4.0])
    assert risen == pytest.approx(4.0)
    assert error == pytest.approx((1 / 3) ** 0.5)


def test_changes_name_parameters_that_there_are_and_their_present_values() -> None:
    params = dict(flattened(read_params(ROOT / "recipes/demo.yaml")))
    for stage, rules in [*STEP_RULES.items(), *RESULT_RULES.items()]:
        for rule in rules:
            named = KEY.findall(rule.change.format(stage=stage))
            assert named and set(named) <= set(params), f"{rule.name} names {named}"
            shown = rule.finding(stage, 3, "seen", params).change
            assert all(f"{key} (now {params[key]})" in shown for key in named)
    [still] = [rule for rule in all_rules() if rule.name == "policy-still"]
    assert still.finding("ppo", 8, "seen", {"ppo.lr": "1e-6"}).change.startswith("Multiply ppo.lr (now 1e-6) by 3")


def test_the_docs_show_the_rules_as_they_are() -> None:
    assert tables() in (ROOT / "docs/health.md").read_text(encoding="utf-8"), "run `python -m tests.health_table`"
