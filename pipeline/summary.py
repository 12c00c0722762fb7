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
wins: share of prompts where the answer scores above SFT's (ties one half), in %,
with a 95% interval; by the reward that PPO climbed (ppo.reward), and by a judge
that PPO never saw. at equal length: the judge's, length accounted for. The judge
shares backbone and data style with the reward model: not independent evidence.
KL: to the SFT model, in nats per answer. tokens: median length. ends: answers
that end by themselves. distinct: different pairs of tokens among all.
how sure: mean of sigmoid(|gap|), in %; off by: how far that is from being
right, in points (expected calibration error).

answers side by side   artifacts/evaluation/sampled.tsv, greedy.tsv
curves                 dvc plots show
runs compared          make ui"""


def answers_table(metrics: dict[str, Any]) -> Table:
    """Base, SFT and policy side by side, sampled and greedy."""
    result = _table(
        "Answers to the held-out prompts",
        ("", "wins by\nreward", "wins by\njudge", "at equal\nlength", "KL", "tokens", "ends", "distinct"),
    )
    for mode in ("sampled", "greedy"):
        result.add_row(mode, style="bold")
        for role, name in ROLES.items():
            row = metrics[mode][role]
            result.add_row(
                f"  {name}",
                _rate(row.get("win_rate_reward")),
                _rate(row.get("win_rate_judge")),
                _rate(row.get("win_rate_judge_length_controlled")),
                f"{row['kl_per_sequence_k1']:.1f}" if mode == "sampled" else "-",
                f"{row['length_median']:.0f}",
                f"{row['end_token_rate']:.0%}",
                f"{row['distinct_2']:.0%}",
            )
    return result


def models_table(metrics: dict[str, Any]) -> Table:
    """Reward model and judge beside what they must beat."""
    title = f"Right on {metrics['reward_model']['pairs']} held-out pairs"
    result = _table(title, ("", "accuracy", "length\nalone", "lead over\nit", "bag of\nwords", "lead over\nit"))
    for name, shown in (("reward_model", "reward"), ("judge_model", "judge")):
        row = metrics[name]
        rivals = (
            rate
            for rival in ("length_alone", "bag_of_words")
            for rate in (_rate(row[f"accuracy_{rival}"]), _lead(row[f"lead_over_{rival}"]))
        )
        result.add_row(shown, _rate(row["accuracy"]), *rivals)
    return result


def trust_table(metrics: dict[str, Any]) -> Table:
    """How sure the two are, and whether they go by length."""
    result = _table(
        "Right by length of the chosen answer; how sure",
        ("", "chosen is\nshorter", "similar", "longer", "how\nsure", "off by\n(ECE)"),
    )
    for name, shown in (("reward_model", "reward"), ("judge_model", "judge")):
        row = metrics[name]
        groups = (_group(row["by_length"][group]) for group in ("chosen_shorter", "similar", "chosen_longer"))
        result.add_row(shown, *groups, f"{row['confidence']:.0%}", f"{100 * row['ece']:.0f}")
    return result


def main() -> None:
    """Prints the tables, and where to look next."""
    if not METRICS.is_file():
        console.print(f"There is no {METRICS} yet; run `make repro`.")
        sys.exit(1)
    metrics = json.loads(METRICS.read_text(encoding="utf-8"))
    console.print(answers_table(metrics), models_table(metrics), trust_table(metrics))
    console.print(NOTES, markup=False)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _rate(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "-"
    return "{mean:.0f}% ({low:.0f}-{high:.0f})".format(**_percent(rate))


def _group(group: dict[str, float]) -> str:
    share = f"{group['accuracy']:.0%}" if group["pairs"] else "-"
    return f"{share} of {group['pairs']:.0f}"


def _lead(difference: dict[str, float]) -> str:
    return "{mean:+.0f} ({low:+.0f}, {high:+.0f})".format(**_percent(difference))


def _percent(rate: dict[str, float]) -> dict[str, float]:
    return {key: 100 * value for key, value in rate.items()}


if __name__ == "__main__":
    main()
