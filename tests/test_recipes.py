"""The recipes of real models hold what their names promise: each stage of the chain fits the card, by the plan."""

import pytest
from conftest import ROOT

from pipeline.planning.bases import configuration
from pipeline.planning.fitting import verdict
from pipeline.planning.settings import Settings, card
from pipeline.planning.stages import plan_stage


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("qwen2.5-0.5b", "8GB"), ("mistral-7b-24gb", "24GB"), ("qwen2.5-7b-24gb", "24GB"), ("llama-3.1-8b-48gb", "48GB")],
)
def test_a_recipe_fits_its_card(recipe: str, size: str) -> None:
    settings, machine = Settings.read(ROOT / f"recipes/{recipe}.yaml"), card(size)
    config = configuration(settings.base.model)
    stages = ("sft", "reward", "judge", "ppo", "evaluate")
    found = {stage: verdict(plan_stage(stage, settings, config, machine), machine) for stage in stages}
    assert found == dict.fromkeys(stages, "fits")
