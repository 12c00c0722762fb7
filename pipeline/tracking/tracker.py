"""A stage's run, as the stage sees it: everything is written to the spool and nothing is ever waited for, but at the end."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.progress import console
from pipeline.tracking.delivery import Courier
from pipeline.tracking.destination import Destination, checkout_name
from pipeline.tracking.registry import FOLDER
from pipeline.tracking.spool import Spool, spools
from pipeline.tracking.standing import Standing
from pipeline.tracking.store import DESCRIPTION, Store

STORE_LOCK = "store.lock"
Logged = frozenset[tuple[str, str, int]]  # whose metric, its name, its step


class Tracker:
    """One attempt at a stage's run. Without a spool it does nothing: `make diagnose` looks at a stage and tracks nothing.

    logged: metrics that an attempt before this one has written. A stage that goes on from a checkpoint computes some of its
        steps again, to the same bits: they are written once (mlflow#4248).
    """

    def __init__(
        self, spool: Spool | None = None, courier: Courier | None = None, wait: float = 0, logged: Logged = frozenset()
    ):
        self.spool = spool
        self._courier = courier
        self._wait = wait
        self._logged = logged
        self._lost = 0

    @property
    def run(self) -> str | None:
        """The run's name in the spool: what a checkpoint keeps, and `start_run` takes to go on with the run."""
        return self.spool.run if self.spool else None

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics; what is not finite is left out."""
        self._metrics("run", step, metrics)

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Rows as a table that MLflow's UI shows."""
        if self.spool and rows:
            columns = list(rows[0])
            table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
            self._write("file", table=True, file=partial(self.spool.keep_json, name, table))

    def log_file(self, file: Path) -> None:
        """A file as an artifact, as it is now."""
        if self.spool:
            self._write("file", table=False, file=partial(self.spool.keep_file, file))

    def log_parent_file(self, file: Path, name: str) -> None:
        """A file as an artifact of the pipeline run, under another name."""
        if self.spool:
            self._write("file", on="parent", table=False, file=partial(self.spool.keep_file, file, name))

    def set_tags(self, tags: Mapping[str, str], on: str = "run") -> None:
        """Tags of the stage's run, or of its parent."""
        self._write("tags", on=on, tags={name: str(value) for name, value in tags.items()})

    def describe(self, text: str) -> None:
        """What MLflow's pages show at the head of the stage's run."""
        self.set_tags({DESCRIPTION: text})

    def describe_parent(self, part: str, text: str) -> None:
        """One paragraph of what they show at the head of the pipeline run; those of other parts stay beside it."""
        self._write("paragraph", on="parent", part=part, text=text)

    def cost(self, stage: str, cost: Mapping[str, float]) -> None:
        """What the stage took, on its own run and, added up over the stages, on the parent."""
        self._metrics("run", 0, cost)
        self._write("cost", stage=stage, cost=dict(cost))

    def register(self, model: str, folder: Path, standing: Standing, resamples: int, seed: int) -> None:
        """The adapter in `folder` as a version of a registered model; see pipeline/tracking/registry.py."""
        if self.spool is None:
            return
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            self._write("file", table=False, file=partial(self.spool.keep_file, file, f"{FOLDER}/{file.name}"))
        self._write("register", model=model, standing=asdict(standing), resamples=resamples, seed=seed)

    def link(self, inputs: Mapping[str, str], versions: Mapping[str, str]) -> None:
        """Names the runs that made the inputs (path -> hash), and says where that was done with other versions of packages."""
        self._write("link", inputs=dict(inputs), versions=dict(versions))

    def summarize(self, stage: str, metrics: Mapping[str, float]) -> None:
        """The stage's final figures, on its own run and, as `stage.name`, on the parent, where runs are compared."""
        self._metrics("run", 0, {f"final.{name}": value for name, value in metrics.items()})
        self._metrics("parent", 0, {f"{stage}.{name}": value for name, value in metrics.items()})

    def sum_up(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """The few figures that runs are compared by, on the parent as `prefix.name`."""
        self._metrics("parent", 0, {f"{prefix}.{name}": value for name, value in metrics.items()})

    def flush(self) -> None:
        """Returns when everything logged is safe on the disk; before a checkpoint, so that no step of it can be missing."""
        if self.spool:
            self.spool.sync()

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED, for the stage's run and its parent. Waits for MLflow a little."""
        self._write("status", status=status)
        left = self._courier.stop(self._wait) if self._courier else 0
        if left:
            say(
                f"{left} entries of this stage have not reached MLflow yet; they are in {self.spool.file.parent}, and the "
                "next stage sends them, or `make sync-tracking`."
            )
        if self._lost:
            say(f"MLflow misses {self._lost} entries of this stage; the figures in metrics/ and plots/ are whole.")

    def _metrics(self, on: str, step: int, metrics: Mapping[str, float]) -> None:
        values = {
            name: float(value)
            for name, value in metrics.items()
            if math.isfinite(value) and (on, name, step) not in self._logged
        }
        if values:
            self._write("metrics", on=on, step=step, values=values)

    def _write(self, do: str, **content: Any) -> None:
        """Appends an entry; `file` is given as what writes it. A full disk costs the entry, not the training."""
        if self.spool is None:
            return
        try:
            if "file" in content:
                content["file"] = content["file"]()
            self.spool.append(do, **content)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                say(f"{self.spool.file} cannot be written ({error}); the stage goes on.")


def start_run(
    to: Destination,
    stage: str,
    pipeline_key: str,
    run_name: str,
    params: Mapping[str, str],
    parent_params: Mapping[str, str],
    tags: Mapping[str, str],
    resume: str | None = None,
) -> Tracker:
    """The stage's run, under the parent that has this pipeline key in this checkout. Returns at once, whatever state MLflow is in.

    Args:
        resume: `Tracker.run` of an attempt to go on with, which is marked KILLED first if it did not say how it ended.

    """
    spool = Spool(to.folder, resume or _new_name(stage))
    logged: Logged = frozenset()
    try:
        to.folder.mkdir(parents=True, exist_ok=True)
        if spool.file.exists():
            spool.repair()
            spool.end_if_dead()
            logged = _logged(spool)
        else:
            parent = {"key": f"{pipeline_key}-{checkout_name(to.folder)}", "name": run_name}
            spool.append("create", experiment=to.experiment, stage=stage, parent=parent)
            spool.append("params", on="parent", params=dict(parent_params))
        spool.append("status", status="RUNNING")
    except OSError as error:
        say(f"{to.folder} cannot be written ({error}); the stage goes on, and MLflow will not know of it.")
        return Tracker()
    earlier = [found for found in spools(to.folder) if found.run != spool.run]
    courier = Courier(spool, earlier, lambda: Store.connect(to.uri, to.folder / STORE_LOCK), say)
    tracker = Tracker(spool, courier, to.wait, logged)
    tracker.set_tags(tags)
    tracker._write("params", params=dict(params))
    # written at once and not at the end of a night: where files cannot be kept, that is said now (mlflow#6515)
    tracker._write("file", table=False, file=partial(spool.keep_json, "parameters", dict(params)))
    courier.start()
    return tracker


def say(text: str) -> None:
    """A line about tracking, for the user."""
    console.print(text, markup=False, style="yellow")


def _new_name(stage: str) -> str:
    """Sorts by time; the last characters tell apart what starts in one microsecond."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{stage}-{secrets.token_hex(2)}"


def _logged(spool: Spool) -> Logged:
    return frozenset(
        (entry["on"], name, entry["step"])
        for entry, _ in spool.read()
        if entry["do"] == "metrics"
        for name in entry["values"]
    )
