"""Opening the base that `prepare` saw, or none. Reward models: pipeline/scorers.py."""

import json

from pipeline.backbone import Backbone, BaseIdentity
from pipeline.base_model import fingerprint, public_name
from pipeline.errors import BaseModelError
from pipeline.loading import load_backbone
from pipeline.params.base import BaseParams
from pipeline.planning.bases import configuration
from pipeline.planning.fitting import outlook, refuse_misfit
from pipeline.planning.settings import GIB, Settings, this_machine
from pipeline.planning.stages import plan_stage
from pipeline.progress import announce
from pipeline.randomness import seed_generators
from pipeline.stage import BASE_FILE, Stage


def open_base(stage: Stage) -> Backbone:
    """The base without adapters. What is drawn after it is the same whatever was drawn to plan and to load it.

    Raises:
        BaseModelError: it has changed since `prepare` recorded its fingerprint.
        NoRoomError: the stage cannot fit into memory.
    """
    base = stage.params(BaseParams, "base")
    recorded = json.loads(stage.input(str(BASE_FILE)).read_text(encoding="utf-8"))["fingerprint"]
    present = fingerprint(stage.base_folder)
    if present != recorded:
        raise BaseModelError(
            f"base.model {base.model!r} has changed since `prepare` ran (fingerprint {present[:12]}, recorded {recorded[:12]}); "
            "run `dvc repro -f prepare` and then `dvc repro`, or put the old base back."
        )
    stage.tracker.set_tags({"base.fingerprint": present})
    if stage.runtime.check_memory:
        plan_memory(stage, base)
    backbone = load_backbone(
        stage.base_folder, base, stage.runtime, BaseIdentity(present, len(stage.tokenizer), *public_name(base.model))
    )
    seed_generators(stage.seed)  # how it was loaded is `runtime:`, which changes no result
    announce(
        "base",
        f"{stage.name}: {base.model} base, {base.quantization}, {base.dtype} on {backbone.device}",
        model=base.model,
        quantization=base.quantization,
        dtype=base.dtype,
        device=str(backbone.device),
    )
    return backbone


def plan_memory(stage: Stage, base: BaseParams) -> None:
    """Says what the stage is going to take, before any weight is loaded.

    Raises:
        NoRoomError: it cannot fit into memory.
    """
    settings, machine = Settings.read(), this_machine(stage.runtime)
    config = configuration(str(stage.base_folder), base.trust_remote_code)
    plan = plan_stage(stage.name, settings, config, machine)
    refuse_misfit(plan, settings, config, machine)
    text = f"{stage.name}: {outlook(plan, machine)}"
    announce("memory", text, planned_peak_gb=plan.peak / GIB, free_gb=machine.free / GIB)
