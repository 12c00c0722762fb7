"""The result as three short tables: what `make repro` and `make dpo` end with."""

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from pipeline.progress import console, print_whole

METRICS = {"repro": Path("metrics/evaluate.json"), "dpo": Path("metrics/evaluate_dpo.json")}
"""What each `make` command leaves behind."""
ROLES = {"base": "base", "sft": "SFT", "policy": "policy", "dpo": "DPO"}
MODELS = {"reward_model": "reward", "judge_model": "judge", "dpo_model": "DPO"}
MODES = ("sampled", "greedy")
NOTES = """\
policy: of stage ppo. DPO: of stage dpo, from the pairs that the reward model has.
wins: share of prompts where the answer scores above SFT's (ties one half), in %,
with a 95% interval; by the reward that PPO climbed (ppo.reward), and by a judge
that PPO never saw. at equal length: the judge's, length accounted for. The judge
shares backbone and data style with the reward model: not independent evidence.
KL: to the SFT model, in nats per answer. tokens: median length. ends: answers
that end by themselves. distinct: different pairs of tokens among all.
how sure: mean of sigmoid(|gap|), in %; off by: how far that is from being
right, in points (expected calibration error).

answers side by side   artifacts/evaluation*/sampled.tsv, greedy.tsv
curves                 dvc plots show
runs compared          make ui"""


def answers_table(metrics: dict[str, Any]) -> Table:
    """Base, SFT and what was trained from it side by side, sampled and greedy."""
    result = _table(
        "Answers to the held-out prompts",
        ("", "wins by\nreward", "wins by\njudge", "at equal\nlength", "KL", "tokens", "ends", "distinct"),
    )
    for mode in MODES:
        result.add_row(mode, style="bold")
        for name, row in _present(ROLES, metrics[mode]):
            result.add_row(
                f"  {name}",
                _rate(row.get("win_rate_reward")),
                _rate(row.get("win_rate_judge")),
                _rate(row.get("win_rate_judge_length_controlled")),
                f"{row['kl_per_sequence_k1']:z.1f}" if mode == "sampled" else "-",
                f"{row['length_median']:.0f}",
                f"{row['end_token_rate']:.0%}",
                f"{row['distinct_2']:.0%}",
            )
    return result


def models_table(metrics: dict[str, Any]) -> Table:
    """Reward model and judge, and DPO's policy as a reward model, beside what they must beat."""
    title = f"Right on {metrics['reward_model']['pairs']} held-out pairs"
    result = _table(title, ("", "accuracy", "length\nalone", "lead over\nit", "bag of\nwords", "lead over\nit"))
    for name, row in _present(MODELS, metrics):
        rivals = (
            rate
            for rival in ("length_alone", "bag_of_words")
            for rate in (_rate(row[f"accuracy_{rival}"]), _lead(row[f"lead_over_{rival}"]))
        )
        result.add_row(name, _rate(row["accuracy"]), *rivals)
    return result


def trust_table(metrics: dict[str, Any]) -> Table:
    """How sure they are, and whether they go by length."""
    result = _table(
        "Right by length of the chosen answer; how sure",
        ("", "chosen is\nshorter", "similar", "longer", "how\nsure", "off by\n(ECE)"),
    )
    for name, row in _present(MODELS, metrics):
        groups = (_group(row["by_length"][group]) for group in ("chosen_shorter", "similar", "chosen_longer"))
        result.add_row(name, *groups, f"{row['confidence']:.0%}", f"{100 * row['ece']:.0f}")
    return result


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
    """Two evaluations as one; None where base or SFT do not have the same figures in both, so that they are of different runs."""
    if any(first[mode][role] != second[mode][role] for mode in MODES for role in ("base", "sft")):
        return None
    return second | first | {mode: second[mode] | first[mode] for mode in MODES}


def main(command: str = "repro") -> None:
    """Prints what `make command` made, with the policy of the other command where that is of the same run."""
    found = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in METRICS.items() if file.is_file()}
    if command not in found:
        console.print(f"There is no {METRICS[command]} yet; run `make {command}`.")
        sys.exit(1)
    metrics = found.pop(command)
    for name, other in found.items():
        both = merged(metrics, other)
        if both is None:
            console.print(
                f"{METRICS[name]} is of another run and is left out; `make {name}` makes it anew.", markup=False
            )
        metrics = both or metrics
    print_whole(answers_table(metrics), models_table(metrics), trust_table(metrics))
    console.print(NOTES, markup=False)


def _present(names: dict[str, str], metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(shown, metrics[name]) for name, shown in names.items() if name in metrics]


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
    main(*sys.argv[1:])
