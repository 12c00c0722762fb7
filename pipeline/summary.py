"""The result as two short tables: what `make repro` ends with."""

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from pipeline.progress import console

METRICS = Path("metrics/evaluate.json")
ROLES = {"base": "base", "sft": "SFT", "policy": "policy"}
NOTES = """\
wins: share of prompts where the answer scores above SFT's (ties one half), with a 95% interval; by the reward model that
PPO was trained on, and by a judge that PPO never saw; "at equal length" is what is left when length is accounted for.
The judge shares backbone and data style with the reward model: it is not independent evidence.
KL: to the SFT model, per answer. ends: answers that end by themselves. distinct: different word pairs among all.

answers side by side   artifacts/evaluation/sampled.tsv, greedy.tsv
curves                 dvc plots show
runs compared          make ui"""


def answers_table(metrics: dict[str, Any]) -> Table:
    """Base, SFT and policy side by side, sampled and greedy."""
    result = Table(title="Answers to the held-out prompts", title_justify="left", box=box.SIMPLE_HEAD)
    for column in (
        "",
        "wins (reward)",
        "wins (judge)",
        "at equal length",
        "reward",
        "KL",
        "tokens",
        "ends",
        "distinct",
    ):
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    for mode in ("sampled", "greedy"):
        result.add_row(mode, style="bold")
        for role, name in ROLES.items():
            row = metrics[mode][role]
            result.add_row(
                f"  {name}",
                _rate(row.get("win_rate_reward")),
                _rate(row.get("win_rate_judge")),
                _rate(row.get("win_rate_judge_length_controlled")),
                f"{row['reward_mean']:.2f}",
                f"{row['kl_per_sequence_k1']:.1f}" if mode == "sampled" else "-",
                f"{row['length_median']:.0f}",
                f"{row['end_token_rate']:.0%}",
                f"{row['distinct_2']:.0%}",
            )
    return result


def models_table(metrics: dict[str, Any]) -> Table:
    """Reward model and judge beside what they must beat."""
    pairs = metrics["reward_model"]["pairs"]
    result = Table(title=f"Right on {pairs} held-out pairs", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "accuracy", "length alone", "bag of words", "lead over words"):
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name in ("reward_model", "judge_model"):
        row = metrics[name]
        result.add_row(
            name.replace("_model", "").replace("reward", "reward model"),
            _rate(row["accuracy"]),
            _rate(row["accuracy_length_alone"]),
            _rate(row["accuracy_bag_of_words"]),
            _rate(row["lead_over_bag_of_words"], sign="+"),
        )
    return result


def main() -> None:
    """Prints the tables, and where to look next."""
    if not METRICS.is_file():
        console.print(f"There is no {METRICS} yet; run `make repro`.")
        sys.exit(1)
    metrics = json.loads(METRICS.read_text(encoding="utf-8"))
    console.print(answers_table(metrics), models_table(metrics))
    console.print(NOTES, markup=False)


def _rate(rate: dict[str, float] | None, sign: str = "") -> str:
    if rate is None:
        return "-"
    return "{mean:{sign}.0%} ({low:.0%} to {high:.0%})".format(sign=sign, **rate)


if __name__ == "__main__":
    main()
