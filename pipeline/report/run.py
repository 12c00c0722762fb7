"""What a run has left behind, read once: metrics, curves, answers, DVC's lock. Whatever is not there is None or empty."""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.files import hash_file
from pipeline.health.__main__ import findings_of_run
from pipeline.health.curve import Curve, Row, read_curve
from pipeline.health.findings import Finding
from pipeline.lineage import DVC_FILES, flattened
from pipeline.params.section import PARAMS_FILE, read_params
from pipeline.report.recipe import Change, leaves
from pipeline.tracking.records import RunRecord

ALONE = "warmup"  # needs nothing of the chain and is no part of the report
DEFAULT_FILE, ALTERNATIVES_FILE = DVC_FILES
Find = Callable[[str, str], RunRecord | None]  # path, SHA-256 of the file there -> MLflow's run that made it


@dataclass(frozen=True)
class StageFacts:
    """A stage, and what is known of the run that made its present metrics.

    inputs: the stages whose outputs it reads.
    metrics: None where it has not run.
    outputs: path -> MD5, as dvc.lock has them.
    changed: parameters that are no longer what the stage was run with.
    record: None where MLflow does not know, or was not asked.
    """

    name: str
    inputs: tuple[str, ...]
    metrics: Mapping[str, Any] | None = None
    curve: Curve = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[Change, ...] = ()
    record: RunRecord | None = None


@dataclass(frozen=True)
class RunFacts:
    """Everything that the report shows.

    params: the content of params.yaml.
    watched: rows of plots/overoptimisation.tsv: the development prompts as PPO went on.
    answers: rows of sampled.tsv of the trained model, and of no other.
    trained: `policy` or `dpo`; None where nothing has been compared with SFT.
    """

    params: Mapping[str, Any]
    stages: Mapping[str, StageFacts]
    findings: Mapping[str, list[Finding]]
    watched: Curve
    answers: list[Row]
    trained: str | None

    def metrics(self, stage: str) -> Mapping[str, Any] | None:
        """What the stage measured; None where it has not run."""
        return self.stages[stage].metrics if stage in self.stages else None

    def curve(self, stage: str) -> Curve:
        """The rows of plots/STAGE.tsv."""
        return self.stages[stage].curve if stage in self.stages else ()

    @property
    def evaluation(self) -> str | None:
        """The stage that compared what was trained with SFT."""
        return {"policy": "evaluate", "dpo": "evaluate_dpo"}.get(self.trained or "")


def nobody_asked(path: str, content_hash: str) -> None:
    """In the place of MLflow, where it cannot be asked."""


def read_run(folder: Path, find: Find = nobody_asked) -> RunFacts:
    """The run whose files lie in `folder`.

    Stages of the second DVC file are shown only where they have run. Where both PPO's and DPO's policy were compared with SFT,
    the report is about PPO's.
    """
    params = read_params(folder / PARAMS_FILE)
    stages = {stage.name: stage for file in DVC_FILES for stage in _stages(folder, file, params, find)}
    trained = next(
        (
            role
            for role, stage in (("policy", "evaluate"), ("dpo", "evaluate_dpo"))
            if stage in stages and stages[stage].metrics
        ),
        None,
    )
    watched = folder / "plots/overoptimisation.tsv"
    answers = folder / f"artifacts/evaluation{'' if trained == 'policy' else '_dpo'}/sampled.tsv"
    return RunFacts(
        params,
        stages,
        findings_of_run(folder, dict(flattened(params)))[0],
        read_curve(watched) if trained == "policy" and watched.is_file() else (),
        read_table(answers) if trained and answers.is_file() else [],
        trained,
    )


def read_table(file: Path) -> list[Row]:
    """Rows of a table whose cells may hold anything; a column of numbers is called NAME_reward or NAME_judge."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [
            {name: float(cell) if name.endswith(("_reward", "_judge")) else cell for name, cell in row.items()}
            for row in rows
        ]


def _stages(folder: Path, file: Path, params: Mapping[str, Any], find: Find) -> list[StageFacts]:
    definitions = _yaml(folder / file)["stages"]
    lock_file = (folder / file).with_name("dvc.lock")
    locked = _yaml(lock_file)["stages"] if lock_file.is_file() else {}
    everything = {name: stage for known in DVC_FILES for name, stage in _yaml(folder / known)["stages"].items()}
    made_by = {_path(entry): name for name, stage in everything.items() for entry in _outputs(stage)}
    found = []
    for name, stage in definitions.items():
        metrics_file, curve_file = folder / f"metrics/{name}.json", folder / f"plots/{name}.tsv"
        has_run = metrics_file.is_file()
        if name == ALONE or (file == ALTERNATIVES_FILE and not has_run):
            continue
        lock = locked.get(name, {})
        inputs = dict.fromkeys(made_by[dep] for dep in stage["deps"] if dep in made_by)
        found.append(
            StageFacts(
                name,
                tuple(inputs),
                json.loads(metrics_file.read_text(encoding="utf-8")) if has_run else None,
                read_curve(curve_file) if has_run and curve_file.is_file() else (),
                {out["path"]: out["md5"] for out in lock.get("outs", [])},
                _changed(lock.get("params", {}).get(PARAMS_FILE, {}), params) if has_run else (),
                find(f"metrics/{name}.json", hash_file(metrics_file)) if has_run else None,
            )
        )
    return found


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    before, after = leaves(then), leaves(now)
    return tuple(Change(key, value, after.get(key)) for key, value in before.items() if after.get(key) != value)


def _outputs(stage: Mapping[str, Any]) -> list[Any]:
    return [entry for kind in ("outs", "metrics", "plots") for entry in stage.get(kind, [])]


def _path(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def _yaml(file: Path) -> dict[str, Any]:
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))
