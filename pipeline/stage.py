"""What all stages share: parameters, seeding, the verified base, tracking, and an end that tells the truth."""

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers

from pipeline.base_model import locate
from pipeline.data.tokenization import ChatTokenizer, load_tokenizer
from pipeline.errors import DataError, UserError
from pipeline.files import hash_path, write_json, write_tsv
from pipeline.health.report import HealthLog
from pipeline.lineage import digest, flattened, git_tags, hardware, numbers, stage_address, stage_definition
from pipeline.params.base import BaseParams, TokensParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import S, load_section, parse_seed, read_params
from pipeline.progress import ProgressBar, console
from pipeline.randomness import derive_seed, prepare_torch
from pipeline.tracking.destination import destination
from pipeline.tracking.tracker import Tracker, start_run

BASE_FILE = Path("prepared/base.json")
VERSIONS = ("torch", "transformers", "peft", "bitsandbytes")


@dataclass
class Stage:
    """One run of one stage.

    name: its name in its DVC file.
    section: its section of params.yaml, from which its seed is derived too: stages that share one see the same noise.
    """

    name: str
    section: str
    seed: int
    runtime: RuntimeParams
    tracker: Tracker
    health: HealthLog
    curves: list[dict[str, float | str]] = field(default_factory=list)

    def params(self, kind: type[S], section: str | None = None) -> S:
        """A section of params.yaml; by default the stage's own."""
        return load_section(section or self.section, kind)

    def input(self, path: str) -> Path:
        """A file or folder that an earlier stage made.

        Raises:
            DataError: it is not there.
        """
        place = Path(path)
        if not place.exists():
            raise DataError(
                f"{self.name} needs {path}, which is not there; "
                f"run `dvc repro {stage_address(self.name)}`, which makes it first."
            )
        return place

    @cached_property
    def base_folder(self) -> Path:
        """Where the base lies on this machine."""
        return locate(self.params(BaseParams, "base").model)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The base's tokenizer."""
        tokens = self.params(TokensParams, "tokens")
        return load_tokenizer(
            self.base_folder,
            tokens.max_prompt,
            tokens.max_response,
            tokens.system,
            tokens.system_role,
            self.params(BaseParams, "base").trust_remote_code,
        )

    def progress(self, total: int) -> ProgressBar:
        """A bar for the stage's loop."""
        return ProgressBar(self.name, total, self.runtime.log_every)

    def tell_trained(self, sizes: dict[str, int]) -> None:
        """Says how many weights are trained, by what they belong to: training none can look like training."""
        counts = ", ".join(f"{count:,} ({name})" for name, count in sizes.items())
        console.print(f"{self.name}: weights that are trained: {counts}", markup=False)
        self.tracker.set_tags({f"trained_weights.{name}": str(count) for name, count in sizes.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One step's figures, to MLflow, to the stage's curves, and to the rules that say what is wrong with them."""
        self.tracker.log_metrics(step, metrics)
        self.curves.append({"step": step, **metrics})
        self.health.step(self.curves[-1])

    def finish(self, metrics: dict[str, Any]) -> None:
        """Writes metrics/<stage>.json and, where there are any, plots/<stage>.tsv."""
        write_json(Path(f"metrics/{self.name}.json"), metrics)
        if self.curves:
            write_tsv(Path(f"plots/{self.name}.tsv"), self.curves)
        self.tracker.summarize(self.name, dict(numbers(metrics)))
        self.health.result(metrics)


def run_stage(name: str, body: Callable[[Stage], None], section: str | None = None) -> None:
    """Runs a stage to a true end: exit 0 and FINISHED; a line for the user, exit 1 and FAILED; or interrupted and KILLED.

    section: the stage's section of params.yaml, where it is not called as the stage is.
    """
    section = section or name
    quiet_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tracker = Tracker()
    status = "FAILED"
    started = time.monotonic()
    try:
        runtime = load_section("runtime", RuntimeParams)
        seed = parse_seed(read_params())
        definition = stage_definition(name)
        tracker = _start_tracking(name, runtime, definition)
        stage_seed = derive_seed(seed, section)
        prepare_torch(stage_seed, runtime)
        health = HealthLog(name, tracker, dict(flattened(read_params())))
        with health.watching():
            body(Stage(name, section, stage_seed, runtime, tracker, health))
        seconds = time.monotonic() - started
        tracker.set_tags({f"output:{path}": hash_path(Path(path)) for path in definition["outs"]})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        tracker.log_metrics(0, {"cost.seconds": seconds, "cost.peak_memory_gb": peak})
        console.print(f"{name}: done in {seconds:.0f} s, peak memory {peak:.1f} GB", markup=False)
        status = "FINISHED"
    except UserError as error:
        console.print(f"{name}: {error}", markup=False, style="red")
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        console.print(f"{name}: stopped; nothing of this stage was kept.", markup=False)
        raise
    finally:
        tracker.end(status)


def _start_tracking(name: str, runtime: RuntimeParams, definition: dict[str, list[str]]) -> Tracker:
    params = read_params()
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
            **{f"version.{package}": version(package) for package in VERSIONS},
            "hardware": hardware(),
            **{f"input:{path}": value for path, value in inputs.items()},
        },
    )
    tracker.link(inputs, {package: version(package) for package in VERSIONS})
    return tracker


def quiet_libraries() -> None:
    """Libraries' bars and warnings would bury our own lines. Their errors still come through."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|peft|bitsandbytes|mlflow)(\..*)?")
