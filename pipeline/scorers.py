"""Reward models and judges as earlier stages left them: adapters on the base, or models of the person's own."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pipeline.backbone import Backbone
from pipeline.base_model import fingerprint, locate_own
from pipeline.classifier import Scorer, load_classifier, read_record, save_record
from pipeline.data.examples import Prompt
from pipeline.errors import BaseModelError
from pipeline.imported import import_reward_model
from pipeline.params.reward import RewardParams
from pipeline.roles import RewardModel
from pipeline.stage import Stage
from pipeline.weights import CONFIG, load_head, save_head


def open_reward_model(stage: Stage, backbone: Backbone, name: str, asked: Iterable[Prompt] = ()) -> Scorer:
    """The reward model or the judge, frozen: an adapter on an open base, or a whole model of the person's own.

    asked: all prompts whose answers it may be shown; a model with another tokenizer is shown them as text.

    Raises:
        DataError, BaseModelError: its adapter or head is missing, damaged or of another base; or it has changed.
    """
    folder = stage.input(f"artifacts/{name}")
    record = read_record(folder)
    if record is not None:
        recorded, shift = record
        model, present = open_own_reward_model(stage, backbone, name, asked)
        if present != recorded:
            raise BaseModelError(
                f"{name}.from has changed since stage {name} ran (fingerprint {present[:12]}, recorded {recorded[:12]}); run "
                f"`dvc repro -f {name}` and then `dvc repro`, or put the old model back."
            )
        return replace(model, shift=shift)
    backbone.load_adapter(name, folder)
    return RewardModel(backbone, name, load_head(folder, backbone.hidden_size, backbone.device))


def save_reward_model(model: Scorer, folder: Path, origin: str | None) -> None:
    """What `open_reward_model` opens again; `origin` is the fingerprint of a model of the person's own.

    Raises:
        TrainingError: a number is not finite; nothing is written.
        StorageError: there is no room, or the folder cannot be written to.
    """
    if isinstance(model, RewardModel):
        model.backbone.save_adapter(model.adapter, folder)
        save_head(model.head, folder)
    else:
        save_record(folder, origin, model.shift)


def open_own_reward_model(stage: Stage, backbone: Backbone, name: str, asked: Iterable[Prompt]) -> tuple[Scorer, str]:
    """What `reward.from` or `judge.from` names, and its fingerprint.

    Raises:
        BaseModelError: it cannot be loaded, or does not fit.
    """
    key, spec = f"{name}.from", stage.params(RewardParams, name).from_
    if spec is None:
        raise BaseModelError(f"{key} is null, but artifacts/{name} was made from a model; run `dvc repro {name}`.")
    folder = locate_own(key, spec)
    if (folder / CONFIG).is_file():
        return import_reward_model(backbone, name, spec), fingerprint(folder)
    dtype = backbone.head_VH.dtype
    return load_classifier(key, spec, folder, dtype, backbone.device, stage.tokenizer, asked), fingerprint(folder)
