"""Curves as inline SVG.

matplotlib draws them: it is locked already, its SVG is some 10 kB a chart, and text stays text. plotly would add 4 MB of script
to a page that is to work without any. Colours are variables of the page's style sheet, so one drawing serves light and dark:
matplotlib is given stand-ins, which are replaced in what it writes.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.health.curve import Curve, values
from pipeline.health.findings import Finding

SIZE = (3.5, 2.15)  # inches; drawn at the size of a column of the page, so that a phone need not shrink its text
INK, FAINT, MARK = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606")
VARIABLES = {INK: "--ink", FAINT: "--line", MARK: "--mark"} | dict(
    zip(SERIES, ("--one", "--two", "--three"), strict=True)
)
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
}
BINS = 24
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Chart:
    """A drawing with its title, and what it says for those who do not see it."""

    title: str
    svg: str
    said: str = ""


@dataclass(frozen=True)
class Plot:
    """Which columns of a stage's curve make a chart. The first is the line, `band` the bounds around it."""

    title: str
    stage: str
    y_label: str
    columns: Mapping[str, str]
    band: tuple[str, str] | None = None


STEP = {"ppo": "iteration"}
PLOTS = (
    Plot("Score of sampled answers", "ppo", "score", {"score_mean": "mean"}, ("score_p10", "score_p90")),
    Plot("KL to the SFT model", "ppo", "nats per answer", {"kl_per_sequence_k1": "k1"}),
    Plot("Length of answers", "ppo", "tokens", {"length_mean": "mean"}, ("length_p10", "length_p90")),
    Plot("Entropy", "ppo", "nats per token", {"entropy": "entropy"}),
    Plot("PPO's losses", "ppo", "loss", {"policy_loss": "policy", "value_loss": "value"}),
    Plot("Clip fraction", "ppo", "share of tokens", {"clip_fraction": "policy", "value_clip_fraction": "value"}),
    Plot("Explained variance of returns", "ppo", "1 is all", {"explained_variance": "explained"}),
    Plot("SFT's loss", "sft", "nats per token", {"loss": "loss"}),
    Plot("Reward model's loss", "reward", "nats per pair", {"loss": "loss"}),
    Plot("Judge's loss", "judge", "nats per pair", {"loss": "loss"}),
    Plot("DPO's loss", "dpo", "nats per pair", {"loss": "loss"}),
    Plot("DPO's accuracy", "dpo", "share of pairs", {"accuracy": "accuracy"}),
)


def curve_chart(plot: Plot, curve: Curve, marks: Mapping[int, str]) -> Chart | None:
    """A figure over the steps, with a dashed line at each step that a finding names; None where no row has it.

    marks: step -> the numbers of its findings, as the list beside the charts counts them.
    """
    lines = {label: values(curve, column) for column, label in plot.columns.items()}
    lines = {label: line for label, line in lines.items() if not np.isnan(line).all()}
    if not lines:
        return None
    steps = values(curve, "step")

    def draw(axes: Axes) -> None:
        if plot.band:
            low, high = (values(curve, name) for name in plot.band)
            axes.fill_between(steps, low, high, color=SERIES[0], alpha=0.18, linewidth=0, label="p10 to p90")
        for colour, (label, line) in zip(SERIES, lines.items(), strict=False):
            axes.plot(steps, line, color=colour, label=label, marker="o" if len(steps) < 30 else None, markersize=2.5)
        for after, numbers in marks.items():
            step = min(after, steps[-1])  # what is found at a stage's end is found after its last step
            axes.axvline(step, color=MARK, linestyle=(0, (3, 2)), linewidth=1)
            axes.annotate(
                numbers, (step, 1), xycoords=("data", "axes fraction"), color=MARK, fontsize=7, ha="center", va="bottom"
            )
        axes.set(xlabel=STEP.get(plot.stage, "optimizer step"), ylabel=plot.y_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(lines) > 1 or plot.band:
            axes.legend(loc="best")

    said = "; ".join(f"{label} from {line[0]:.3g} to {line[-1]:.3g}" for label, line in lines.items())
    return Chart(plot.title, svg(draw, plot.title), f"{said} over {len(steps)} steps")


def marks_of(findings: Sequence[Finding], first: int) -> dict[int, str]:
    """Step -> numbers of the findings at it, counted from `first`."""
    marks: dict[int, str] = {}
    for number, finding in enumerate(findings, first):
        marks[finding.step] = f"{marks[finding.step]},{number}" if finding.step in marks else str(number)
    return marks


def frontier(points: Curve, budget: float, kept: int) -> Chart:
    """What reward and judge say of the same answers to the development prompts, over KL, from the start of PPO to its end.

    Args:
        points: rows of plots/overoptimisation.tsv: step, kl, reward, judge.
        budget: `ppo.keep_max_kl`.
        kept: the step whose policy was kept.
    """
    title = "Reward against KL, development prompts"
    kl, steps = values(points, "kl"), values(points, "step")

    def draw(axes: Axes) -> None:
        for colour, name in zip(SERIES, ("reward", "judge"), strict=False):
            axes.plot(kl, values(points, name), color=colour, marker="o", markersize=3, label=name)
        for step, x, y in zip(steps, kl, values(points, "reward"), strict=True):
            axes.annotate(f"{step:.0f}", (x, y), (0, 5), textcoords="offset points", fontsize=7, ha="center")
            if step == kept:
                axes.plot(x, y, marker="o", markersize=9, markerfacecolor="none", color=MARK, label="kept")
        if max(kl) > 0.6 * budget:
            axes.axvline(budget, color=FAINT, linestyle="--", linewidth=1, label="keep_max_kl")
        axes.margins(y=0.2)
        axes.set(xlabel="nats to the SFT model, per answer", ylabel="mean score")
        axes.legend(loc="best")

    said = ", ".join(f"step {step:.0f} at {x:.1f} nats" for step, x in zip(steps, kl, strict=True))
    return Chart(title, svg(draw, title), said)


def distribution(scorer: str, scores: Mapping[str, Sequence[float]]) -> Chart:
    """Histograms of one scorer's scores by role, in shared bins."""
    title = f"Scores by the {scorer}"
    edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), BINS)

    def draw(axes: Axes) -> None:
        for colour, (role, found) in zip(reversed(SERIES[: len(scores)]), scores.items(), strict=True):
            axes.hist(found, edges, histtype="stepfilled", color=colour, alpha=0.25)
            axes.hist(found, edges, histtype="step", color=colour, linewidth=1.3, label=role)
            axes.axvline(float(np.mean(found)), color=colour, linestyle=":", linewidth=1.2)
        axes.set(xlabel=f"score of the {scorer}; dotted: the mean", ylabel="answers")
        axes.legend(loc="best")

    said = ", ".join(f"{role} {np.mean(found):.2f}" for role, found in scores.items())
    return Chart(title, svg(draw, title), f"means: {said}")


def svg(draw: Draw, salt: str) -> str:
    """What `draw` puts on one pair of axes, for a page to take in as it is.

    salt: names inside the drawing are made of it, so that two drawings on a page do not share one.
    """
    with mpl.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=SIZE)
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<g) id="[^"]*"', r"\1", text)  # figure_1, axes_1, …: the same in every drawing
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1aria-hidden="true"', text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    return text
