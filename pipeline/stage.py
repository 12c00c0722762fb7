"""What all stages share: parameters, seeding, the verified base, tracking, and an end that tells the truth."""

import contextlib
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers

from pipeline import finished, interruption, launch, processes
from pipeline.banner import gpu_memory, tell_end, tell_start, tell_work
from pipeline.base_model import locate
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import DataError, StorageError, UserError
from pipeline.files import hash_path, write_json, write_tsv
from pipeline.health.report import HealthLog
from pipeline.interruption import Interrupted
from pipeline.lineage import (
    dvc_lock,
    flattened,
    numbers,
    stage_address,
    stage_definition,
    stage_inputs,
    state_key,
    versions,
)
from pipeline.lock import alone_in
from pipeline.out_of_memory import reporting
from pipeline.params.base import BaseParams, TokensParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import S, load_section, parse_seed, read_params
from pipeline.progress import ProgressBar, console, show_as
from pipeline.randomness import derive_seed, prepare_torch
from pipeline.stage_run import start_tracking
from pipeline.tracking.tracker import Tracker

BASE_FILE = Path("prepared/base.json")
WORK = ".work"  # what is kept of stages that have not come to their end
RUN = "run"  # the file that names an unfinished stage's run in MLflow


@dataclass
class Stage:
    """One run of one stage.

    name: its name in its DVC file.
    section: its section of params.yaml, from which its seed is derived too: stages that share one see the same noise.
    folder: its own as long as parameters, inputs and code are what they are; removed when the stage has finished and DVC has its outputs.
    on_stop: writes what is not to be lost, and says in words where the next run goes on; None where that is the start.
    """

    name: str
    section: str
    seed: int
    runtime: RuntimeParams
    tracker: Tracker
    health: HealthLog
    folder: Path = Path(WORK)
    on_stop: Callable[[], str | None] = lambda: None
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

    def tell_trained(self, sizes: dict[str, int], adapters: list[str], work: str) -> None:
        """Says what is about to be trained: see `tell_work`."""
        tell_work(self.name, sizes, adapters, work, self.params(TokensParams, "tokens"))
        self.tracker.set_tags({f"trained_weights.{name}": str(count) for name, count in sizes.items()})

    def tell_limit(self, name: str, limit: int) -> None:
        """Says that memory holds a runtime parameter down, and marks the run: rounding is that of the smaller value."""
        console.print(
            f"{self.name}: out of memory; runtime.{name} is {limit} from here on, which may change the last bits.",
            markup=False,
            style="yellow",
        )
        self.tracker.set_tags({f"{name.removesuffix('_tokens')}.halved": str(limit)})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One step's figures, to MLflow, to the stage's curves, and to the rules that say what is wrong with them.

        A figure that is not finite is an empty cell of the curve.
        """
        self.tracker.log_metrics(step, metrics)
        self.curves.append({"step": step, **{name: value for name, value in metrics.items() if math.isfinite(value)}})
        self.health.step({"step": step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        """The curves, for a checkpoint."""
        return {"curves": list(self.curves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.curves = state["curves"]
        self.health.replay(self.curves)

    @property
    def circumstances(self) -> dict[str, str]:
        """What may change the last bits of a result without being tracked."""
        settings = {f"runtime.{name}": value for name, value in flattened(self.runtime.model_dump())}
        rounding = (
            "device",
            "threads",
            "deterministic",
            "attention",
            "microbatch_tokens",
            "rollout_chunk",
            "decoder",
            "packing",
            "compile",
        )
        return versions() | {key: settings[key] for key in (f"runtime.{name}" for name in rounding)}

    def finish(self, metrics: dict[str, Any]) -> None:
        """Writes metrics/<stage>.json and, where there are any, plots/<stage>.tsv."""
        write_json(Path(f"metrics/{self.name}.json"), metrics)
        if self.curves:
            write_tsv(Path(f"plots/{self.name}.tsv"), self.curves)
        self.tracker.summarize(self.name, dict(numbers(metrics)))
        self.health.result(metrics)


def run_stage(name: str, body: Callable[[Stage], None], section: str | None = None) -> None:
    """Runs a stage to a true end: exit 0 and FINISHED; a line for the user, exit 1 and FAILED; or interrupted and KILLED.

    In one process, or in as many as section `runtime` says, of which the main one writes.
    section: the stage's section of params.yaml, where it is not called as the stage is.
    """
    quiet_libraries()
    try:
        with interruption.listening():
            runtime = load_section("runtime", RuntimeParams)
            if launch.is_due(name, runtime):
                launch.start(name, runtime.processes)
                return
            with launch.joined(name, runtime), _alone(name) as folder:
                _run_alone(name, body, section or name, folder)
                if processes.is_main():
                    finished.leave(folder, name, dvc_lock(name))
    except UserError as error:
        launch.hand_over(error)
        if processes.count() == 1:
            console.print(f"{name}: {error}", markup=False, style="red")
        sys.exit(1)
    except Interrupted as stop:
        sys.exit(stop.exit_status)
    except Exception as error:  # whatever it is, the process that started this one is to say it
        launch.hand_over(error)
        raise


@contextlib.contextmanager
def _alone(name: str) -> Iterator[Path]:
    """The folder where the stage's state lies, nobody else being at work on it or on the stage's outputs.

    It is in the main checkout also where DVC runs an experiment in a copy, which it removes at the end.
    """
    work = Path(os.environ.get("DVC_ROOT", ".")) / WORK
    folder = work / name / state_key(name, stage_inputs(stage_definition(name)))
    if not processes.is_main():
        yield folder
        return
    finished.sweep(work)
    with alone_in(Path(WORK) / name, f"stage {name}"), alone_in(folder, f"stage {name} with these parameters"):
        yield folder


def _run_alone(name: str, body: Callable[[Stage], None], section: str, folder: Path) -> None:
    runtime = load_section("runtime", RuntimeParams)
    show_as(runtime.progress)
    seed = derive_seed(parse_seed(read_params()), section)
    definition = stage_definition(name)
    started = time.monotonic()
    tracker = start_tracking(name, runtime, definition, folder / RUN) if processes.is_main() else Tracker()
    stage = Stage(
        name, section, seed, runtime, tracker, HealthLog(name, tracker, dict(flattened(read_params()))), folder
    )
    tracker.describe(" ".join((body.__globals__["__doc__"] or "").split()))  # what the stage's module says of it
    status = "FAILED"
    tell_start(name, parse_seed(read_params()), runtime, str(Path(WORK) / name))
    try:
        prepare_torch(seed, runtime)
        with stage.health.watching(), reporting(stage.tell_limit):
            interruption.stop_anywhere()
            body(stage)
            interruption.wait_for_polls()
        if processes.is_main():
            tracker.set_tags({f"output:{path}": hash_path(Path(path)) for path in definition["outs"]})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        seconds = time.monotonic() - started
        cost = {"cost.seconds": seconds, "cost.peak_memory_gb": peak, **gpu_memory()}
        tracker.cost(name, cost)
        tell_end(name, cost)
        status = "FINISHED"
    except Interrupted as stop:
        status = "KILLED"
        kept = stage.on_stop()
        console.print(
            f"{name}: stopped by {stop.reason}; the next run goes on {kept or 'from its start'}.", markup=False
        )
        raise
    except StorageError:  # nothing more can be written
        raise
    except UserError:
        if kept := stage.on_stop():
            console.print(f"{name}: with the same parameters the next run goes on {kept}.", markup=False)
        raise
    finally:
        tracker.end(status)


def quiet_libraries() -> None:
    """Libraries' bars and warnings would bury our own lines. Their errors still come through."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|peft|bitsandbytes|mlflow)(\..*)?")
