"""MLflow: one parent run per pipeline run, one child per stage. The only import of mlflow in the project.

A tracking failure never stops training: it is said once, counted, and said again at the end.
"""

import logging
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
from alembic.util.exc import CommandError
from filelock import FileLock
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.async_logging.run_operations import RunOperations
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
from sqlalchemy.exc import SQLAlchemyError

from pipeline.progress import console

# What a tracking server or its database may raise; anything else is a fault of ours and must be seen.
TRACKING_ERRORS = (MlflowException, SQLAlchemyError, CommandError, OSError)
# By default a request is tried for minutes before it fails; a stage would stand still for as long.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
PIPELINE_KEY = "pipeline.key"
FOREIGN_TO_NAMES = re.compile(r"[^\w\-. :/]")


@dataclass
class Tracker:
    """A stage's run. Without a run id (tracking could not start) it does nothing.

    logged: the steps of each metric that an attempt before this one has sent. A stage that goes on from a checkpoint
        computes some of its steps again, to the same bits: they are sent once (mlflow#4248).
    """

    client: MlflowClient | None = None
    run_id: str | None = None
    parent_id: str | None = None
    failures: int = 0
    logged: dict[str, set[int]] = field(default_factory=dict)
    _pending: list[RunOperations] = field(default_factory=list)

    @property
    def run(self) -> str | None:
        """What `start_run` takes to go on with this run."""
        return self.run_id

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """One step's metrics in one asynchronous call; what is not finite is left out."""
        batch = [metric for metric in _metrics(metrics, step) if step not in self.logged.get(metric.key, ())]
        if batch and self.run_id is not None:
            with self._guarded("metrics"):
                self._pending.append(self.client.log_batch(self.run_id, metrics=batch, synchronous=False))

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Rows as a table that MLflow's UI shows."""
        if self.run_id is not None and rows:
            columns = {column: [row[column] for row in rows] for column in rows[0]}
            with self._guarded("a table"):
                self.client.log_table(self.run_id, columns, f"{name}.json")

    def log_file(self, file: Path) -> None:
        """A file as an artifact."""
        if self.run_id is not None:
            with self._guarded(f"{file.name}"):
                self.client.log_artifact(self.run_id, str(file))

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags of the stage's run."""
        if self.run_id is not None:
            with self._guarded("tags"):
                self.client.log_batch(self.run_id, tags=[RunTag(name, str(value)) for name, value in tags.items()])

    def summarize(self, stage: str, metrics: dict[str, float]) -> None:
        """The stage's final figures, on its own run and, as `stage.name`, on the parent, where runs are compared."""
        self.log_metrics(0, {f"final.{name}": value for name, value in metrics.items()})
        if self.parent_id is not None:
            with self._guarded("the summary"):
                named = {f"{stage}.{name}": value for name, value in metrics.items()}
                self.client.log_batch(self.parent_id, metrics=_metrics(named, step=0))

    def flush(self) -> None:
        """Waits until everything sent so far has arrived."""
        for operation in self._pending:
            with self._guarded("metrics"):
                operation.wait()
        self._pending.clear()

    def end(self, status: str) -> None:
        """FINISHED, FAILED or KILLED, for the stage's run and its parent."""
        self.flush()
        for run_id in (self.run_id, self.parent_id):
            if run_id is not None:
                with self._guarded("the end of the run"):
                    self.client.set_terminated(run_id, status)
        if self.failures:
            console.print(
                f"MLflow missed {self.failures} calls of this stage; the figures in metrics/ and plots/ are whole.",
                markup=False,
            )

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except TRACKING_ERRORS as error:
            self.failures += 1
            if self.failures == 1:
                console.print(
                    f"MLflow did not take {what} ({_first_line(error)}); the stage goes on without it.", markup=False
                )


def start_run(
    uri: str,
    experiment: str,
    lock_file: Path,
    stage: str,
    pipeline_key: str,
    run_name: str,
    params: dict[str, str],
    parent_params: dict[str, str],
    tags: dict[str, str],
    resume: str | None = None,
) -> Tracker:
    """The stage's run, under the parent that has this pipeline key. `resume` is `Tracker.run` of an attempt to go on with.

    Finding or making experiment and parent happens under a file lock: two stages that start at once must not make two,
    nor create the database twice.
    """
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    tracker = Tracker()
    with tracker._guarded("the start of the run"):
        mlflow.set_tracking_uri(uri)
        client = MlflowClient(uri)
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_file):
            experiment_id = _experiment(client, experiment)
            parent = _parent(client, experiment_id, pipeline_key, run_name, parent_params)
        client.update_run(parent.info.run_id, status="RUNNING")
        child_tags = {MLFLOW_PARENT_RUN_ID: parent.info.run_id, **tags}
        if resume is None:
            resume = client.create_run(experiment_id, run_name=stage, tags=child_tags).info.run_id
            client.log_batch(resume, params=_params(params))
        else:
            if client.get_run(resume).info.status == "RUNNING":
                client.set_terminated(resume, "KILLED")  # what it was, before it is RUNNING again
            client.update_run(resume, status="RUNNING")
            client.log_batch(resume, tags=[RunTag(name, str(value)) for name, value in child_tags.items()])
            tracker.logged = _logged(client, resume)
        tracker.client, tracker.run_id, tracker.parent_id = client, resume, parent.info.run_id
    return tracker


def find_output(tracker: Tracker, name: str, content_hash: str) -> Run | None:
    """The newest run that has made this output, also when DVC restored it from its cache since."""
    if tracker.client is None:
        return None
    with tracker._guarded("a search"):
        own = tracker.client.get_run(tracker.run_id)
        found = tracker.client.search_runs(
            [own.info.experiment_id],
            f"tags.`output:{name}` = '{content_hash}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return found[0] if found else None
    return None


def _logged(client: MlflowClient, run_id: str) -> dict[str, set[int]]:
    names = client.get_run(run_id).data.metrics
    return {name: {metric.step for metric in client.get_metric_history(run_id, name)} for name in names}


def _experiment(client: MlflowClient, name: str) -> str:
    known = client.get_experiment_by_name(name)
    return known.experiment_id if known is not None else client.create_experiment(name)


def _parent(client: MlflowClient, experiment_id: str, key: str, run_name: str, params: dict[str, str]) -> Run:
    found = client.search_runs([experiment_id], f"tags.`{PIPELINE_KEY}` = '{key}'", max_results=1)
    if found:
        return found[0]
    run = client.create_run(experiment_id, tags={PIPELINE_KEY: key, MLFLOW_RUN_NAME: run_name}, run_name=run_name)
    client.log_batch(run.info.run_id, params=_params(params))
    return run


def _metrics(metrics: dict[str, float], step: int) -> list[Metric]:
    """The finite ones, under names that MLflow takes: one odd name would cost the whole batch."""
    now = int(time.time() * 1000)
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return [Metric(FOREIGN_TO_NAMES.sub("_", name), value, now, step) for name, value in finite.items()]


def _params(params: dict[str, str]) -> list[Param]:
    return [Param(name, value[:MAX_PARAM_VAL_LENGTH]) for name, value in params.items()]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else 'no message'}"
