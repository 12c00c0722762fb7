"""The result as a short table: what `make repro` ends with."""

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from pipeline.progress import console

METRICS = Path("metrics/evaluate.json")
NOTES = """\
wins: share of prompts where the answer scores above SFT's, with a 95% interval; by the reward model that PPO was
trained on, and by a judge that PPO never saw. The judge shares backbone and data style: it is not independent.
KL: to the SFT model, per answer. ends: answers that end by themselves.

answers side by side   artifacts/evaluation/samples.tsv
curves                 dvc plots show
runs compared          make ui"""


def table(metrics: dict[str, Any]) -> Table:
    """Base, SFT and policy side by side."""
    result = Table(title="Held-out prompts, one sampled answer each", title_justify="left", box=box.SIMPLE_HEAD)
    result.add_column("")
    for column in ("wins (reward)", "wins (judge)", "reward", "KL, nats", "tokens", "ends"):
        result.add_column(column, justify="right", no_wrap=True)
    for role, name in (("base", "base"), ("sft", "SFT"), ("policy", "policy")):
        row = metrics[role]
        result.add_row(
            name,
            _rate(row.get("win_rate_reward")),
            _rate(row.get("win_rate_judge")),
            f"{row['reward_mean']:.2f}",
            f"{row['kl_per_sequence_k1']:.1f}",
            f"{row['length_mean']:.0f}",
            f"{row['end_token_rate']:.0%}",
        )
    return result


def main() -> None:
    """Prints the table, and where to look next."""
    if not METRICS.is_file():
        console.print(f"There is no {METRICS} yet; run `make repro`.")
        sys.exit(1)
    console.print(table(json.loads(METRICS.read_text(encoding="utf-8"))))
    console.print(NOTES, markup=False)


def _rate(rate: dict[str, float] | None) -> str:
    return "-" if rate is None else f"{rate['mean']:.0%} ({rate['low']:.0%}-{rate['high']:.0%})"


if __name__ == "__main__":
    main()
