"""Where figures go, and where they wait: section `runtime` and the environment, made absolute."""

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.params.runtime import RuntimeParams

SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Destination:
    """MLflow, and the folder of the spools.

    uri: a database or a server. It may hold a password: never print it.
    experiment: MLflow's experiment.
    folder: of the spools.
    wait: seconds that the end of a stage may wait for MLflow.
    """

    uri: str
    experiment: str
    folder: Path
    wait: float


def destination(runtime: RuntimeParams) -> Destination:
    """As `runtime` says; the variable MLFLOW_TRACKING_URI goes before it. Relative places are in the main checkout."""
    root = main_checkout()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or runtime.tracking_uri
    if uri.startswith(SQLITE):
        uri = f"{SQLITE}{root / uri.removeprefix(SQLITE)}"
    return Destination(uri, runtime.experiment, root / ".work" / "tracking", runtime.tracking_wait)


def main_checkout() -> Path:
    """The checkout that DVC was called in. `dvc exp run --temp` and `--queue` run stages in a copy that is then thrown away."""
    return Path(os.environ.get("DVC_ROOT") or Path.cwd()).resolve()
