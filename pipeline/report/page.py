"""The page: what `run.py` has read, arranged and rendered. Every text goes through the template's escaping: answers are untrusted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.health.findings import Finding
from pipeline.health.report import CLEAN
from pipeline.progress import duration
from pipeline.report.answers import representative
from pipeline.report.charts import PLOTS, Chart, curve_chart, distribution, frontier, marks_of
from pipeline.report.graph import HEIGHT, WIDTH, drawing
from pipeline.report.recipe import nearest_recipe
from pipeline.report.run import RunFacts, StageFacts
from pipeline.verdict import mood, verdict

TEMPLATES = Path(__file__).parent
CODE = re.compile(r"`([^`]+)`")
ROLES = {"base": "base", "sft": "SFT", "policy": "policy", "dpo": "DPO"}


@dataclass(frozen=True)
class Tile:
    """A figure that matters, large."""

    label: str
    value: str
    note: str = ""


def render(run: RunFacts, recipes: Sequence[Path], now: datetime | None = None) -> str:
    """The whole page.

    Args:
        recipes: parameter files to compare the run's parameters with.
        now: when the page is made, UTC.
    """
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "duration": duration,
        "percent": _percent,
        "rate": _rate,
        "drawn": _drawn,
        "cell": _cell,
        "marked": _marked,
    }
    numbered = numbered_findings(run)
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return templates.get_template("page.html").render(
        run=run,
        now=now or datetime.now(UTC),
        style=_of_ours(css),
        roles=ROLES,
        base=run.params.get("base", {}).get("model"),
        verdict=verdict(run.metrics(run.evaluation), run.trained) if run.trained else None,
        mood=mood(run.metrics(run.evaluation), run.trained) if run.trained else "even",
        missing=missing(run),
        tiles=tiles(run),
        findings=[(number, stage, finding) for stage, found in numbered.items() for number, finding in found],
        clean=CLEAN,
        drawing=drawing(run.stages),
        box=(WIDTH, HEIGHT),
        seconds=sum(stage.record.seconds or 0 for stage in run.stages.values() if stage.record),
        curves=curves(run, numbered),
        comparison=comparison(run),
        exchanges=representative(run.answers, run.trained) if run.answers else [],
        held_out=len(run.answers),
        results=results(run),
        data=run.metrics("prepare"),
        recipe=nearest_recipe(recipes, run.params),
        tags=tags(run.stages),
    )


def picture(chart: Chart) -> str:
    """A chart as a file of its own, in the page's light colours."""
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    colours: dict[str, str] = {}
    for variable, colour in re.findall(r"(--\w+): (#\w+)", style):
        colours.setdefault(variable, colour)  # the first is the light one
    return re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], chart.svg)


def numbered_findings(run: RunFacts) -> dict[str, list[tuple[int, Finding]]]:
    """The findings of all stages, counted through, so that a mark on a curve can name its own."""
    numbered: dict[str, list[tuple[int, Finding]]] = {}
    count = 0
    for stage, found in run.findings.items():
        numbered[stage] = list(enumerate(found, count + 1))
        count += len(found)
    return numbered


def curves(run: RunFacts, numbered: Mapping[str, Sequence[tuple[int, Finding]]]) -> list[Chart]:
    """A chart for each figure that the run has, marked where a rule spoke."""
    found = []
    for plot in PLOTS:
        own = numbered.get(plot.stage, ())
        marks = marks_of([finding for _, finding in own], own[0][0] if own else 1)
        if run.curve(plot.stage):
            found.append(curve_chart(plot, run.curve(plot.stage), marks))
    return [chart for chart in found if chart]


def comparison(run: RunFacts) -> list[Chart]:
    """Reward against KL, and scores before and after."""
    found = []
    if run.watched and run.metrics("ppo"):
        ppo = run.params.get("ppo", {})
        found.append(frontier(run.watched, ppo.get("keep_max_kl"), run.metrics("ppo")["kept_step"]))
    points = run.curve(run.evaluation) if run.evaluation else ()
    for scorer, name in (("reward", "reward of training"), ("judge", "judge")):
        scores = {
            ROLES[role]: [float(row[scorer]) for row in points if row["role"] == role]
            for role in ("base", "sft", run.trained)
            if any(row["role"] == role for row in points)
        }
        if scores:
            found.append(distribution(name, scores))
    return found


def tiles(run: RunFacts) -> list[Tile]:
    """The figures under the verdict."""
    if not run.trained:
        return []
    metrics = run.metrics(run.evaluation)
    ours, sft = metrics["sampled"][run.trained], metrics["sampled"]["sft"]
    return [
        Tile("wins by the judge", _percent(ours["win_rate_judge"]["mean"]), _bounds(ours["win_rate_judge"])),
        Tile("wins by the reward", _percent(ours["win_rate_reward"]["mean"]), _bounds(ours["win_rate_reward"])),
        Tile("KL to SFT", f"{ours['kl_per_sequence_k1']:z.1f}", "nats per answer"),
        Tile("length", f"{ours['length_median']:.0f}", f"tokens, median; SFT {sft['length_median']:.0f}"),
        Tile("reward", f"{ours['reward_mean']:.2f}", f"mean; SFT {sft['reward_mean']:.2f}"),
        Tile(
            "reward model right",
            _percent(metrics["reward_model"]["accuracy"]["mean"]),
            f"{_bounds(metrics['reward_model']['accuracy'])} of {metrics['reward_model']['pairs']} held-out pairs",
        ),
    ]


def results(run: RunFacts) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(mode, role, figures) of the evaluation."""
    metrics = run.metrics(run.evaluation) if run.evaluation else None
    modes = ("sampled", "greedy") if metrics else ()
    return [(mode, ROLES[role], metrics[mode][role]) for mode in modes for role in ROLES if role in metrics[mode]]


def missing(run: RunFacts) -> list[str]:
    """What is not on the page, and what would put it there; one sentence each."""
    said = []
    absent = [name for name, stage in run.stages.items() if stage.metrics is None]
    if absent:
        said.append(f"Not run yet: {', '.join(absent)}. `make repro` runs them.")
    if run.trained == "dpo":
        said.append("PPO's policy has not been compared with SFT; this page is about DPO's.")
    if run.trained and not run.answers:
        said.append("The answers are not on this machine; `make repro` makes them, or takes them from DVC's cache.")
    changed = [name for name, stage in run.stages.items() if stage.changed]
    if changed:
        said.append(
            f"params.yaml has changed since these ran: {', '.join(changed)}. The figures below are of the parameters before."
        )
    unknown = [name for name, stage in run.stages.items() if stage.metrics is not None and stage.record is None]
    if unknown:
        said.append(f"MLflow has no run that made what lies here for: {', '.join(unknown)}; their times are not known.")
    return said


def tags(stages: Mapping[str, StageFacts]) -> list[tuple[str, str, list[str]]]:
    """(tag, value, stages) of what the stages were run with; one row where all agree."""
    wanted = ("git.commit", "git.dirty", "hardware", "base.fingerprint", "version.")
    found: dict[tuple[str, str], list[str]] = {}
    for name, stage in stages.items():
        for tag, value in sorted(stage.record.tags.items()) if stage.record else ():
            if tag.startswith(wanted):
                found.setdefault((tag, value), []).append(name)
    return [(tag, value, names) for (tag, value), names in sorted(found.items())]


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _bounds(rate: Mapping[str, float]) -> str:
    return f"{rate['low']:.0%} to {rate['high']:.0%}"


def _rate(rate: Mapping[str, float]) -> str:
    return f"{_percent(rate['mean'])} ({_bounds(rate)})"


def _cell(value: Any) -> str:
    """A parameter's value as params.yaml would have it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _drawn(chart: Chart) -> Markup:
    """Matplotlib's SVG, in which it has escaped every text itself."""
    return _of_ours(chart.svg)


def _marked(text: str) -> Markup:
    """A text with `code` in it, escaped."""
    return _of_ours(CODE.sub(r"<code>\1</code>", str(escape(text))))


def _of_ours(text: str) -> Markup:
    """A text that no stranger has had a hand in, and that is not escaped."""
    return Markup(text)  # nosec B704
