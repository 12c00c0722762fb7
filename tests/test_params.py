"""params.yaml: strict, ranged, and errors that name key, value, rule and remedy."""

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import ROOT
from ruamel.yaml import YAML

from pipeline.errors import ParameterError
from pipeline.params.base import BaseParams
from pipeline.params.check import SECTIONS, check_params
from pipeline.params.ppo import PPOParams
from pipeline.params.reward_terms import RewardTerm
from pipeline.params.section import Section, load_section, parse_section, read_params

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DEMO = read_params(ROOT / "recipes" / "demo.yaml")


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    file = tmp_path / "params.yaml"
    YAML(typ="safe").dump(content, file)
    return file


def changed(section: str, **values) -> dict[str, Any]:
    content = copy.deepcopy(DEMO)
    content[section] |= values
    return content


@pytest.mark.parametrize("recipe", [ROOT / "params.yaml", *RECIPES], ids=lambda path: path.name)
def test_recipes_are_whole(recipe: Path) -> None:
    check_params(recipe)


def test_the_default_is_the_demo_recipe() -> None:
    assert read_params(ROOT / "params.yaml") == DEMO


def test_minibatch_error_says_key_value_rule_and_remedy() -> None:
    with pytest.raises(ParameterError) as error:
        parse_section("ppo", PPOParams, DEMO["ppo"] | {"minibatch_size": 24, "rollout_size": 64})
    assert str(error.value) == "ppo.minibatch_size is 24 but must divide ppo.rollout_size 64; try 16 or 32."


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("ppo", {"clpi": 0.2}, "ppo.clpi is not a parameter; did you mean ppo.clip?"),
        ("ppo", {"clip": "0.2"}, "ppo.clip is '0.2' but must be a number; for example 0.2."),
        ("ppo", {"clip": 1.5}, "ppo.clip is 1.5 but must be less than 1; for example 0.2."),
        ("ppo", {"temperature": 0}, "ppo.temperature is 0 but must be greater than 0; for example 1.0."),
        ("ppo", {"iterations": True}, "ppo.iterations is True but must be a integer; for example 12."),
        ("base", {"dtype": "float16"}, "base.dtype is 'float16' but must be 'bfloat16' or 'float32'; for example 'bfloat16'."),
        ("base", {"model": "hf://org/name"}, "base.model is 'hf://org/name' but a hub model must name its revision; write hf://org/name@revision."),
        ("runtime", {"launch": "fsdp", "base_cache": "on"}, "runtime.base_cache is on but with runtime.launch fsdp no process keeps whole weights; set it to off, or runtime.launch to ddp."),
        ("runtime", {"launch": "fsdp", "compile": "layers"}, "runtime.compile is layers but with runtime.launch fsdp no process keeps whole weights; set it to off, or runtime.launch to ddp."),
        ("runtime", {"processes": 1}, "runtime.processes is 1 but must be greater than or equal to 2; for example 2."),
        ("ppo", {"kl_estimator": "k2"}, "ppo.kl_estimator is 'k2' but must be k1 or k3: k2 in the reward is no estimate of KL's gradient; use k1."),
    ],
    ids=["unknown", "text", "range", "temperature 0", "truth value", "choice", "unpinned", "whole", "compiled", "one", "k2"],
)  # fmt: skip
def test_bad_value(section: str, change: dict, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_section(section, SECTIONS[section], DEMO[section] | change)
    assert str(error.value) == message


def test_missing_key_names_an_example() -> None:
    content = {key: value for key, value in DEMO["base"].items() if key != "model"}
    with pytest.raises(ParameterError, match=r"^base\.model is missing; for example 'embedded'\.$"):
        parse_section("base", BaseParams, content)


def test_nested_keys_are_named_whole() -> None:
    content = copy.deepcopy(DEMO["data"])
    content["split"]["heldot"] = 3
    with pytest.raises(
        ParameterError, match=r"data\.split\.heldot is not a parameter; did you mean data\.split\.heldout\?"
    ):
        parse_section("data", SECTIONS["data"], content)


def test_shares_must_make_one() -> None:
    content = copy.deepcopy(DEMO["data"])
    content["split"]["sft"] = 0.5
    with pytest.raises(ParameterError, match=r"sft \+ reward \+ judge \+ ppo is 1\.2 but must be 1"):
        parse_section("data", SECTIONS["data"], content)


def test_exponents_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 readers take 1e-5 for a string; DVC reads a number, and so do we."""
    text = re.sub(r"\n  lr: \S+", "\n  lr: 1e-5", (ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(text)
    assert load_section("ppo", PPOParams, tmp_path / "params.yaml").lr == 1e-5


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    content = changed("ppo", clip=2.0)
    content["sft"]["epochs"] = 0
    content["sead"] = 1
    with pytest.raises(ParameterError) as error:
        check_params(written(tmp_path, content))
    for part in ("ppo.clip is 2.0", "sft.epochs is 0", "sead is not a section"):
        assert part in str(error.value)


@pytest.mark.parametrize("seed", [None, True, -1, 1.5])
def test_seed_is_checked(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(ParameterError, match=r"seed is .* but must be a whole number"):
        check_params(written(tmp_path, copy.deepcopy(DEMO) | {"seed": seed}))


def test_unusual_values_are_warned_of_with_the_reason(tmp_path: Path) -> None:
    content = changed("ppo", gamma=0.99, lr=5e-6)
    warnings = " ".join(check_params(written(tmp_path, content)))
    assert "ppo.gamma is 0.99" in warnings and "teaches brevity" in warnings
    assert "ppo.lr is 5e-06" in warnings and "full fine-tuning" in warnings


def test_a_ppo_rate_above_sfts_is_warned_of(tmp_path: Path) -> None:
    warnings = " ".join(check_params(written(tmp_path, changed("ppo", lr=1.5 * DEMO["sft"]["lr"]))))
    assert "above sft.lr" in warnings


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="does not exist"):
        read_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("a: [1")
    with pytest.raises(ParameterError, match="is not valid YAML"):
        read_params(tmp_path / "params.yaml")


def test_every_parameter_is_documented() -> None:
    def fields(section: type[Section]) -> list:
        return [
            (name, field)
            for name, field in section.model_fields.items()
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
        ]

    kinds = SECTIONS | {f"ppo.reward.{kind.__name__}": kind for kind in get_args(get_args(RewardTerm)[0])}
    for name, section in kinds.items():
        for key, field in fields(section):
            assert field.description and field.examples, f"{name}.{key}"


def test_sections_cannot_be_changed() -> None:
    section = parse_section("ppo", PPOParams, DEMO["ppo"])
    with pytest.raises(ValueError, match="frozen"):
        section.clip = 0.1
