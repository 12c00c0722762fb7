"""The whole params.yaml at once: every section, nothing else, and what the sections say of one another."""

from pathlib import Path
from typing import Any

from pipeline.errors import ParameterError
from pipeline.params.base import BaseParams, LoraParams, TokensParams
from pipeline.params.data import DataParams
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import PARAMS_FILE, Section, parse_section, parse_seed, read_params, unusual_values
from pipeline.params.sft import SFTParams

SECTIONS: dict[str, type[Section]] = {
    "base": BaseParams,
    "lora": LoraParams,
    "tokens": TokensParams,
    "data": DataParams,
    "sft": SFTParams,
    "reward": RewardParams,
    "judge": RewardParams,
    "ppo": PPOParams,
    "evaluate": EvaluateParams,
    "runtime": RuntimeParams,
}


def check_params(path: str | Path = PARAMS_FILE) -> list[str]:
    """Checks every section of the file; the warnings about unusual values, one sentence each.

    Raises:
        ParameterError: all faults of all sections.
    """
    content = read_params(path)
    faults: list[str] = []
    sections: dict[str, Any] = {}
    for name in content:
        if name != "seed" and name not in SECTIONS:
            faults.append(f"{name} is not a section of {path}; known: seed, {', '.join(SECTIONS)}.")
    for name, kind in SECTIONS.items():
        if name not in content:
            faults.append(f"{path} has no section {name}; copy it from recipes/demo.yaml.")
            continue
        try:
            sections[name] = parse_section(name, kind, content[name])
        except ParameterError as error:
            faults.append(str(error))
    try:
        parse_seed(content)
    except ParameterError as error:
        faults.append(str(error))
    if faults:
        raise ParameterError(" ".join(faults))
    warnings = [sentence for name, section in sections.items() for sentence in unusual_values(name, section)]
    warnings += sections["ppo"].notes
    if sections["ppo"].lr > sections["sft"].lr:
        warnings.append(
            f"ppo.lr is {sections['ppo'].lr:g}, above sft.lr {sections['sft'].lr:g}: "
            "RL gradients are noisier than supervised ones and usually want the smaller rate."
        )
    return warnings
