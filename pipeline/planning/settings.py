"""The parameters that memory depends on, and the machine that is to hold it."""

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from pipeline.errors import ParameterError
from pipeline.loading import pick_device
from pipeline.params.base import BaseParams, LoraParams, TokensParams
from pipeline.params.data import DataParams
from pipeline.params.dpo import DPOParams
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import PARAMS_FILE, load_section
from pipeline.params.sft import SFTParams
from pipeline.planning.bases import whole_model_size
from pipeline.quantization import free_memory

GIB = 2**30
# What a process takes on a GPU before its first tensor: context, kernels, cuBLAS. A guess: no GPU was at hand to measure it.
CUDA_CONTEXT = GIB // 2
# Pages of torch's code that are read when it first computes, on a CPU: as benchmarks/memory.py measured it.
CODE_PAGES = 64 * 2**20


@dataclass(frozen=True)
class Settings:
    """Sections of a parameter file."""

    base: BaseParams
    lora: LoraParams
    tokens: TokensParams
    data: DataParams
    sft: SFTParams
    reward: RewardParams
    judge: RewardParams
    ppo: PPOParams
    dpo: DPOParams
    runtime: RuntimeParams

    @classmethod
    def read(cls, path: str | Path = PARAMS_FILE) -> Self:
        """From a parameter file.

        Raises:
            ParameterError: the file or one of its sections is at fault.
        """
        return cls(**{field.name: load_section(field.name, field.type, path) for field in fields(cls)})

    @cached_property
    def own_models(self) -> dict[str, int]:
        """Whole reward models and judges of the person's own, in bytes. Their passes are taken to be as large as the base's."""
        dtype = getattr(torch, self.base.dtype)
        specs = {"reward": self.reward.from_, "judge": self.judge.from_}
        sizes = {name: whole_model_size(spec, dtype) for name, spec in specs.items() if spec is not None}
        return {name: size for name, size in sizes.items() if size}

    def with_(self, section: str, **changes: Any) -> Self:
        """With other values in one section."""
        return replace(self, **{section: getattr(self, section).model_copy(update=changes)})


@dataclass(frozen=True)
class Machine:
    """Where stages are to run.

    free: bytes that one process can take in all.
    overhead: what it takes before its first tensor: interpreter and libraries, or the CUDA context.
    """

    name: str
    device: torch.device
    free: int
    overhead: int

    @property
    def on_cpu(self) -> bool:
        """Whether it is no GPU."""
        return self.device.type == "cpu"


def this_machine(runtime: RuntimeParams) -> Machine:
    """The device that `runtime.device` means here, as free as it is now; on a CPU the overhead is this process as it is now.

    Raises:
        BaseModelError: a GPU is asked for and there is none.
    """
    device = pick_device(runtime)
    free = free_memory(device)
    if device.type == "cuda":
        return Machine(torch.cuda.get_device_name(device), device, free, CUDA_CONTEXT)
    taken = psutil.Process().memory_info().rss
    return Machine("this machine", device, free + taken, taken + CODE_PAGES)


def card(size: str) -> Machine:
    """A GPU of `size`, such as 24GB: cards are sold in GB and count in GiB.

    Raises:
        ParameterError: that is no size.
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:G|GB|GiB)", size, re.IGNORECASE)
    if number is None or not float(number[1]):
        raise ParameterError(f"CARD is {size!r} but must be a size in GB; for example 24GB.")
    return Machine(f"a card of {size}", torch.device("cuda"), int(float(number[1]) * GIB), CUDA_CONTEXT)
