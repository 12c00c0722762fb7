"""What `make warmup` ends with: a table with the curves in small, and the curves as a picture."""

import csv
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from pipeline.cartpole import SOLVED
from pipeline.progress import console

METRICS, CURVES, PICTURE = Path("metrics/warmup.json"), Path("plots/warmup.tsv"), Path("plots/warmup.png")
NAMES = {"reinforce_without_baseline": "REINFORCE, no baseline", "reinforce": "REINFORCE", "ppo": "PPO"}
BARS = "▁▂▃▄▅▆▇█"
LONGEST = 500.0
WIDTH = 30  # characters of a small curve
NOTES = """\
Mean return of the trained policy in episodes it has not seen; an episode pays 1 a
step, 500 at most, and CartPole counts as solved at 475. sampled: as trained, worst:
its shortest episode; greedy: the likeliest action. At the right, how it was learnt."""


def small_curve(values: list[float]) -> str:
    """A character per value, from 0 to 500; of many values each second, each third and so on."""
    shown = values[:: -(-len(values) // WIDTH)]
    return "".join(BARS[round(value / LONGEST * (len(BARS) - 1))] for value in shown)


def table(metrics: dict[str, dict[str, dict[str, float]]], curves: dict[str, list[float]]) -> Table:
    """Every algorithm with every seed."""
    result = Table(title="CartPole-v1", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "sampled", "worst", "greedy"):
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    result.add_column(f"{curves['episodes'][-1]:.0f} episodes of training", no_wrap=True)
    for name, shown in NAMES.items():
        result.add_row(shown, style="bold")
        for seed in sorted(metrics[name], key=lambda seed: int(seed.removeprefix("seed_"))):
            figures = (f"{metrics[name][seed][key]:.0f}" for key in ("sampled_mean", "sampled_min", "greedy_mean"))
            result.add_row(f"  {seed.replace('_', ' ')}", *figures, small_curve(curves[f"{name}_{seed}"]))
    return result


def picture(curves: dict[str, list[float]]) -> Figure:
    """Each algorithm's mean over the seeds, thick, and each seed, thin."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, shown) in enumerate(NAMES.items()):
        for column, values in curves.items():
            if column.startswith(f"{name}_seed_"):
                axes.plot(curves["episodes"], values, color=f"C{number}", linewidth=0.6, alpha=0.6)
        axes.plot(curves["episodes"], curves[name], color=f"C{number}", linewidth=2.5, label=shown)
    axes.axhline(SOLVED, color="grey", linestyle="--", linewidth=1, label="solved")
    axes.set(
        xlabel="episodes played", ylabel="return, mean of an iteration", title="CartPole-v1", ylim=(0, LONGEST + 10)
    )
    axes.legend(loc="upper left")
    return figure


def main() -> None:
    """Prints the table and writes the picture."""
    if not METRICS.is_file():
        console.print(f"There is no {METRICS} yet; run `make warmup`.")
        sys.exit(1)
    with CURVES.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    curves = {column: [float(row[column]) for row in rows] for column in rows[0]}
    console.print(table(json.loads(METRICS.read_text(encoding="utf-8")), curves))
    picture(curves).savefig(PICTURE, dpi=90)
    console.print(f"{NOTES}\n\ncurves as a picture    {PICTURE}\nwhat is done, and why  docs/warmup.md", markup=False)


if __name__ == "__main__":
    main()
