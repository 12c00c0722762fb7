"""What MLflow knows of the run that made a file: read only, and by content, so also where DVC took the file from its cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.tracking.store import Store, answers


@dataclass(frozen=True)
class RunRecord:
    """A stage's run.

    run_id, parent_id: MLflow's names of it and of the pipeline run that it is a part of.
    seconds, memory_gb: what it took; None where it did not come to its end.
    """

    run_id: str
    parent_id: str
    started: datetime
    seconds: float | None
    memory_gb: float | None
    tags: Mapping[str, str]


class Records:
    """The runs of one experiment, asked of a store.

    Raises:
        Refused, Unavailable: whenever it is asked.
    """

    def __init__(self, store: Store, experiment: str):
        self._store = store
        with answers():
            known = store.client.get_experiment_by_name(experiment)
        self._experiment = known.experiment_id if known else None

    def find(self, path: str, content_hash: str) -> RunRecord | None:
        """The newest run that wrote these bytes to `path`; None where there is none."""
        if self._experiment is None:
            return None
        with answers():
            run = self._store.maker(self._experiment, path, content_hash)
        if run is None:
            return None
        metrics, tags = run.data.metrics, dict(run.data.tags)
        return RunRecord(
            run.info.run_id,
            self._store.parent_id(run),
            datetime.fromtimestamp(run.info.start_time / 1000, UTC),
            metrics.get("cost.seconds"),
            metrics.get("cost.peak_memory_gb"),
            tags,
        )
