"""Does it fit, and what can be changed?"""

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from pipeline.errors import NoRoomError
from pipeline.planning.settings import GIB, Machine, Settings
from pipeline.planning.stages import StagePlan, plan_stage

CERTAIN = 1.15  # a plan may be 15% off: what needs more than this many times what is free cannot fit
SMALL_CHUNK, SMALL_LOGPROB_CHUNK, SMALL_MICROBATCH = 16, 128, 1  # a row alone


def verdict(plan: StagePlan, machine: Machine) -> str:
    """In a word or two."""
    if plan.peak > CERTAIN * machine.free:
        return "does not fit"
    return "fits" if CERTAIN * plan.peak <= machine.free else "may just fit"


def changes(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Runtime parameters that lower memory, and to what; first those that cost least speed. The result stays what it is, but for rounding."""
    runtime = settings.runtime
    if runtime.rollout_chunk > SMALL_CHUNK:
        yield "rollout_chunk", SMALL_CHUNK
    if runtime.logprob_chunk > SMALL_LOGPROB_CHUNK:
        yield "logprob_chunk", SMALL_LOGPROB_CHUNK
    if runtime.microbatch_tokens > SMALL_MICROBATCH:
        yield "microbatch_tokens", SMALL_MICROBATCH
    if not runtime.gradient_checkpointing:
        yield "gradient_checkpointing", True
    if settings.base.quantization == "nf4" and runtime.base_cache != "off":
        yield "base_cache", "off"


def outlook(plan: StagePlan, machine: Machine) -> str:
    """One line of a plan."""
    return f"memory plan: about {gib(plan.peak)} at the peak ({plan.highest.name}), {gib(machine.free)} free"


def refuse_misfit(plan: StagePlan, settings: Settings, config: PretrainedConfig, machine: Machine) -> None:
    """Nothing, unless it is certain that the planned stage cannot fit.

    Raises:
        NoRoomError: says what would, as far as runtime parameters go.
    """
    if plan.peak <= CERTAIN * machine.free:
        return
    raise NoRoomError(
        f"it does not fit into memory: it takes about {gib(plan.peak)} ({plan.highest.name}) and {machine.name} has {gib(machine.free)} free. "
        f"{_remedy(plan, settings, config, machine)} `make plan` shows what takes how much; "
        "runtime.check_memory: false starts it all the same."
    )


def gib(size: int) -> str:
    """For people."""
    return f"{size / GIB:.1f} GiB"


def _remedy(plan: StagePlan, settings: Settings, config: PretrainedConfig, machine: Machine) -> str:
    """As many changes as it takes, and what the stage takes then."""
    made, lowest = [], plan
    for key, value in list(changes(settings)):
        settings = settings.with_("runtime", **{key: value})
        plan = plan_stage(plan.stage, settings, config, machine)
        if plan.peak == lowest.peak:
            continue
        made.append(f"runtime.{key}: {str(value).lower()}")
        lowest = plan
        if plan.peak <= machine.free:
            return f"With {', '.join(made)} it takes {gib(plan.peak)}."
    nf4 = "" if settings.base.quantization == "nf4" else "base.quantization: nf4, "
    return f"No runtime parameter is enough (lowest {gib(lowest.peak)}); try {nf4}smaller tokens.max_prompt and tokens.max_response, or a smaller base."
