"""Where figures go, and where they wait: section `runtime` and the environment, made absolute."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from pipeline.params.runtime import RuntimeParams

SQLITE = "sqlite:///"
CHECKOUT = "SOLO_RLHF_CHECKOUT"


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


def checkout_name(folder: Path) -> str:
    """What tells the pipeline runs of this checkout from equal ones of another in the same MLflow.

    The variable SOLO_RLHF_CHECKOUT, by which several machines that work on one run say so, or drawn once and kept in `folder`, that of the spools.
    """
    file = folder / "checkout"
    if CHECKOUT in os.environ:
        return os.environ[CHECKOUT]
    with FileLock(folder / "checkout.lock"):
        if not file.exists() or not file.read_text(encoding="ascii"):
            file.write_text(secrets.token_hex(4), encoding="ascii")
        return file.read_text(encoding="ascii")


def main_checkout() -> Path:
    """The checkout that DVC was called in. `dvc exp run --temp` and `--queue` run stages in a copy that is then thrown away."""
    return Path(os.environ.get("DVC_ROOT") or Path.cwd()).resolve()
