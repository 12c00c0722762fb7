"""A stage's run in MLflow, from its start: what it is called, belongs to and is made of."""

import os
from pathlib import Path

from pipeline.files import hash_path, write_text
from pipeline.lineage import (
    digest,
    flattened,
    git_tags,
    hardware,
    parent_tags,
    unpinned,
    versions,
)
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import read_params
from pipeline.tracking.destination import destination
from pipeline.tracking.tracker import Tracker, start_run


def start_tracking(name: str, runtime: RuntimeParams, definition: dict[str, list[str]], run_file: Path) -> Tracker:
    """The stage's run under its pipeline run's parent, with what it is made of; an unfinished one, named in `run_file`, goes on."""
    params = read_params()
    moving = unpinned(params)
    raw = {key: value for key, value in params.items() if key != "runtime"}
    sources = [
        Path(str(value))
        for key, value in flattened(raw)
        if key in ("data.pairs", "data.demonstrations", "data.prompts")
    ]
    inputs = {
        path: hash_path(Path(path)) for path in definition["deps"] if not path.endswith(".py") and Path(path).exists()
    }
    code = [hash_path(Path(folder)) for folder in ("pipeline", "stages", "rewards")]
    tracker = start_run(
        destination(runtime),
        stage=name,
        pipeline_key=digest(raw, *(hash_path(source) for source in sources if source.exists()), *code),
        run_name=os.environ.get("DVC_EXP_NAME") or f"seed {raw.get('seed')}",
        params=dict(
            flattened({key: params[key] for key in ("seed", *definition["params"], "runtime") if key in params})
        ),
        parent_params=dict(flattened(raw)),
        tags={
            "dvc.stage": name,
            "dvc.experiment": os.environ.get("DVC_EXP_NAME", ""),
            **git_tags(),
            "reproducible": str(not moving).lower(),
            "unpinned": ", ".join(moving),
            **{f"version.{package}": number for package, number in versions().items()},
            "hardware": hardware(),
            **{f"input:{path}": value for path, value in inputs.items()},
        },
        resume=run_file.read_text(encoding="utf-8") if run_file.exists() else None,
    )
    if tracker.run is not None:
        write_text(run_file, tracker.run)
    tracker.set_tags(parent_tags(params), on="parent")
    tracker.link(inputs, versions())
    return tracker
