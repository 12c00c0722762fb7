"""MLflow: the only import of it. What each kind of entry becomes there.

Everything here may be done twice and is then as if done once, because whoever delivers may die between doing it and noting
it: runs are found again by a tag before they are made; a row of a metric has its key, step, time and value for its identity,
and the time is the entry's; files are written again. (That holds for MLflow's SQL stores, on SQLite and behind a server.)
"""

import json
import logging
import os
import posixpath
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from alembic.util.exc import CommandError
from filelock import FileLock
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)
from sqlalchemy.exc import SQLAlchemyError

from pipeline.masking import masked
from pipeline.tracking import registry
from pipeline.tracking.destination import SQLITE
from pipeline.tracking.runs import Refused, Runs, Unavailable
from pipeline.tracking.shaping import first_line, name_of, parts, short
from pipeline.tracking.spool import Entry
from pipeline.tracking.view import COMPARISON, PIPELINE_KEY

# One request is tried once: whoever delivers tries again itself, and asks first what has arrived.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
# At the end of a run MLflow prints the server's address, password and all.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
DESCRIPTION = MLFLOW_RUN_NOTE  # the tag that MLflow's pages show at the head of a run
PARAGRAPH = "about."  # and the part's name: the tag of one paragraph of a description
RUN_KEY = "tracking.run"  # the name that the run has in the spool
_name = partial(name_of, limit=MAX_ENTITY_KEY_LENGTH)
SERVED = "mlflow-artifacts:/"  # artifacts are where the server that is asked for them keeps them, on whatever machine
NEVER = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
}


class Store:
    """An MLflow database or server.

    files: the folder beside an SQLite database that holds its artifacts; None where a server keeps them.
    """

    def __init__(self, client: MlflowClient, lock: FileLock, files: Path | None):
        self.client = client
        self.lock = lock
        self.files = files

    @classmethod
    def connect(cls, uri: str, lock_file: Path) -> Self:
        """Under the lock, as two that make one database at once would both make its tables.

        Raises:
            Unavailable: nobody answers, or the database is of another version of MLflow.
        """
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log as an error is raised too
        database = uri.removeprefix(SQLITE).partition("?")[0] if uri.startswith(SQLITE) else None
        lock = FileLock(lock_file)
        with answers(), lock:
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
        return cls(client, lock, Path(database).parent / "mlruns" if database else None)

    def knows(self, run_id: str) -> bool:
        """Whether the run is in this store."""
        try:
            with answers():
                self.client.get_run(run_id)
        except Refused:
            return False
        return True

    def open_runs(self, run: str, entry: Entry) -> Runs:
        """The runs of an entry `create`: found, or made as they were at its time.

        Raises:
            Unavailable: also where the experiment is deleted: without a run nothing else can be delivered.
        """
        try:
            with answers(), self.lock:
                experiment = self._experiment(entry["experiment"])
                parent = self._found(experiment, PIPELINE_KEY, entry["parent"]["key"])
                if parent is None:
                    tags = {PIPELINE_KEY: entry["parent"]["key"]}
                    parent = self._made(experiment, entry["parent"]["name"], tags, entry["at"])
                child = self._found(experiment, RUN_KEY, run)
                if child is None:
                    tags = {RUN_KEY: run, MLFLOW_PARENT_RUN_ID: parent.info.run_id}
                    child = self._made(experiment, entry["stage"], tags, entry["at"])
        except Refused as error:
            raise Unavailable(str(error)) from error
        return Runs(child.info.run_id, parent.info.run_id)

    def deliver(self, entries: Sequence[Entry], runs: Runs, folder: Path) -> list[str]:
        """One entry, or some of kind `metrics` about one run, in one request. What a person should know of it.

        folder: where the files lie that entries name.

        Raises:
            Unavailable, Refused: see there.
        """
        first, run_id = entries[0], runs.of(entries[0])
        with answers():
            match first["do"]:
                case "metrics":
                    rows = [row for entry in entries for row in _rows(entry)]
                    for part in parts(rows, MAX_METRICS_PER_BATCH):
                        self.client.log_batch(run_id, metrics=part)
                case "tags":
                    self._set_tags(run_id, first["tags"], folder)
                case "paragraph":
                    self._add_paragraph(run_id, first, folder)
                case "params":
                    self._log_params(run_id, first["params"], folder)
                case "file":
                    self._put(run_id, folder / first["file"], first["file"])
                    if first["table"]:
                        self._announce_table(run_id, first["file"])
                case "status":
                    self._set_status(runs, first)
                case "cost":
                    self._add_up(runs.parent, first)
                case "register":
                    return [self._register(run_id, first)]
                case "link":
                    return self._link(run_id, first, folder)
        return []

    def keep(self, run_id: str, file: Path, name: str) -> None:
        """A file as an artifact, now.

        Raises:
            Unavailable, Refused: see there.
        """
        with answers():
            self._put(run_id, file, name)

    def maker(self, experiment: str, path: str, content_hash: str) -> Run | None:
        """The newest run that wrote bytes of this hash to `path`."""
        return self._found(experiment, f"output:{path}", content_hash)

    def parent_id(self, run: Run) -> str:
        """MLflow's name of the pipeline run that a stage's run is a part of."""
        return run.data.tags[MLFLOW_PARENT_RUN_ID]

    def _experiment(self, name: str) -> str:
        known = self.client.get_experiment_by_name(name)
        # MLflow's own default beside a database is an absolute path of this machine, kept for ever (mlflow#6515)
        place = SERVED + _name(name) if self.files else None
        experiment = known.experiment_id if known else self.client.create_experiment(name, place)
        if known is None or COMPARISON[0] not in known.tags:
            self.client.set_experiment_tag(experiment, *COMPARISON)
        return experiment

    def _found(self, experiment: str, tag: str, value: str) -> Run | None:
        newest = ["attributes.start_time DESC"]
        found = self.client.search_runs([experiment], f"tags.`{tag}` = '{value}'", order_by=newest, max_results=1)
        return found[0] if found else None

    def _made(self, experiment: str, name: str, tags: dict[str, str], at: int) -> Run:
        return self.client.create_run(experiment, start_time=at, tags=tags, run_name=name)

    def _set_tags(self, run_id: str, tags: Mapping[str, str], folder: Path) -> None:
        shaped = [RunTag(_name(name), short(value, MAX_TAG_VAL_LENGTH)) for name, value in tags.items()]
        for part in parts(shaped, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(run_id, tags=part)
        for name, value in tags.items():
            if len(value) > MAX_TAG_VAL_LENGTH:
                self._put_text(run_id, f"tags/{_name(name)}.txt", value, folder)

    def _add_paragraph(self, run_id: str, entry: Entry, folder: Path) -> None:
        """The run's description is made of one paragraph of each part; a part said again replaces what it said before."""
        mine = {f"{PARAGRAPH}{entry['part']}": entry["text"]}
        known = self.client.get_run(run_id).data.tags | mine
        paragraphs = [known[name] for name in sorted(known) if name.startswith(PARAGRAPH)]
        self._set_tags(run_id, mine | {DESCRIPTION: "\n\n".join(paragraphs)}, folder)

    def _log_params(self, run_id: str, params: Mapping[str, str], folder: Path) -> None:
        """New ones. MLflow refuses another value for an old one: that becomes a tag (mlflow#7046)."""
        known = self.client.get_run(run_id).data.params
        shaped = {_name(name): short(value, MAX_PARAM_VAL_LENGTH) for name, value in params.items()}
        new = [Param(name, value) for name, value in shaped.items() if name not in known]
        for part in parts(new, MAX_PARAMS_TAGS_PER_BATCH):
            self.client.log_batch(run_id, params=part)
        drifted = {name: value for name, value in shaped.items() if known.get(name, value) != value}
        self._set_tags(run_id, {f"param_drift.{name}": value for name, value in drifted.items()}, folder)

    def _set_status(self, runs: Runs, entry: Entry) -> None:
        for run_id in (runs.run, runs.parent):
            if entry["status"] == "RUNNING":
                self.client.update_run(run_id, status="RUNNING")
            else:
                self.client.set_terminated(run_id, entry["status"], entry.get("ended") or entry["at"])

    def _link(self, run_id: str, entry: Entry, folder: Path) -> list[str]:
        """Names the run that made each input, the newest one; notes where that was done with other versions."""
        experiment = self.client.get_run(run_id).info.experiment_id
        tags, notes = {}, []
        for path, content_hash in entry["inputs"].items():
            found = self.maker(experiment, path, content_hash)
            if found:
                tags[f"upstream:{path}"] = found.info.run_id
                then = found.data.tags
                notes += [
                    f"{path} was made with {package} {then.get(f'version.{package}')}, this stage runs with {now}."
                    for package, now in entry["versions"].items()
                    if then.get(f"version.{package}") != now
                ]
        self._set_tags(run_id, tags, folder)
        return notes

    def _add_up(self, parent_id: str, entry: Entry) -> None:
        """What a stage cost, on the parent as `cost.NAME.STAGE`, and what all stages did as `cost.NAME`: sums of time, peaks of memory.

        A stage that goes on from a checkpoint, or runs again, counts with its last attempt.
        """
        cost = {f"{name}.{entry['stage']}": value for name, value in entry["cost"].items()}
        known = self.client.get_run(parent_id).data.metrics | cost
        for name in entry["cost"]:
            stages = [value for key, value in known.items() if key.startswith(f"{name}.")]
            cost[name] = sum(stages) if name.endswith("seconds") else max(stages)
        self.client.log_batch(
            parent_id, metrics=[Metric(_name(name), value, entry["at"], 0) for name, value in cost.items()]
        )

    def _register(self, run_id: str, entry: Entry) -> str:
        """A policy as a version of a registered model.

        Raises:
            Refused: whatever the reason, as a registry is not on every server, and must not hold up figures.
        """
        try:
            with self.lock:
                return registry.register(self.client, self.client.get_run(run_id), entry)
        except MlflowException as error:
            raise Refused(f"{entry['model']} cannot be registered: {first_line(error)}") from error

    def _put(self, run_id: str, file: Path, name: str) -> None:
        """An artifact. Beside an SQLite database this client is its own server, with mlruns/ for its folder.

        Raises:
            Refused: whatever the reason: files must not hold up figures.
        """
        place = self.client.get_run(run_id).info.artifact_uri
        try:
            if self.files and place.startswith(SERVED):
                target = self.files / place.removeprefix(SERVED) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            else:
                self.client.log_artifact(run_id, str(file), posixpath.dirname(name) or None)
        except (OSError, MlflowException) as error:
            raise Refused(f"{name} cannot be written to {masked(place)}: {first_line(error)}") from error

    def _put_text(self, run_id: str, name: str, text: str, folder: Path) -> None:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        self._put(run_id, file, name)

    def _announce_table(self, run_id: str, name: str) -> None:
        """The tag by which MLflow's pages know a table, as its log_table sets it; that would append to one sent before."""
        tables: list[Any] = json.loads(self.client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        table = {"path": name, "type": "table"}
        if table not in tables:
            self.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*tables, table]))


@contextmanager
def answers() -> Iterator[None]:
    """What a server or its database may raise, as one of our two kinds; anything else is a fault of ours and must be seen."""
    try:
        yield
    except MlflowException as error:
        raise (Refused if error.error_code in NEVER else Unavailable)(first_line(error)) from error
    except (SQLAlchemyError, CommandError, OSError) as error:
        raise Unavailable(first_line(error)) from error


def _rows(entry: Entry) -> list[Metric]:
    return [Metric(_name(name), value, entry["at"], entry["step"]) for name, value in entry["values"].items()]
