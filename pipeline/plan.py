"""`make plan`: what each stage takes at its peak, part by part, whether that fits, and what can be changed; then room on the disk, and hours.

Loads no weight.
"""

import argparse
import re
import sys
from collections.abc import Iterable

from rich import box
from rich.table import Table
from transformers import PretrainedConfig

from pipeline.errors import ParameterError, UserError
from pipeline.params.section import PARAMS_FILE
from pipeline.planning.bases import configuration
from pipeline.planning.fitting import changes, gib, verdict
from pipeline.planning.needs import USED, cards_like, disk, hours, shape_of
from pipeline.planning.settings import GIB, Machine, Settings, card, this_machine
from pipeline.planning.stages import StagePlan, plan_stage
from pipeline.progress import console, print_whole
from pipeline.stage import quiet_libraries

STAGES = ("sft", "reward", "ppo", "evaluate")


def main() -> None:
    """Prints three tables; exit status 1, and one line, where a plan cannot be made."""
    parser = argparse.ArgumentParser(prog="make plan", description=__doc__)
    parser.add_argument("recipe", nargs="?", default=PARAMS_FILE, help="a parameter file; by default params.yaml")
    parser.add_argument("--card", help="a GPU's memory, such as 24GB; by default this machine as free as it is now")
    parser.add_argument("--base", help="another base than base.model: a folder, or a name such as Qwen2.5-7B")
    parser.add_argument("--tokens", help="other lengths than tokens has: PROMPT+RESPONSE, such as 256+256")
    chosen = parser.parse_args()
    quiet_libraries()
    try:
        settings = _settings(chosen)
        machine = card(chosen.card) if chosen.card else this_machine(settings.runtime)
        show(settings, machine)
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)


def show(settings: Settings, machine: Machine) -> None:
    """The plan of the chain."""
    config = configuration(settings.base.model, settings.base.trust_remote_code)
    plans = {stage: plan_stage(stage, settings, config, machine) for stage in STAGES}
    tokens = settings.tokens
    console.print(
        f"{settings.base.model} ({settings.base.quantization}, {settings.base.dtype}) on {machine.name}, {gib(machine.free)} free; rows of "
        f"{tokens.max_prompt} + {tokens.max_response} tokens, {settings.runtime.microbatch_tokens} tokens in a micro-batch",
        markup=False,
    )
    print_whole(parts_table(plans, machine))
    for stage, plan in plans.items():
        console.print(f"{stage}: highest in {plan.highest.name}; {verdict(plan, machine)}", markup=False)
    sft, ppo = plans["sft"], plans["ppo"]
    above = (ppo.peak - machine.overhead) / (sft.peak - machine.overhead)
    console.print(
        f"PPO's peak is {ppo.peak / sft.peak:.2f} times SFT's ({above:.2f} times, less {sft.parts[0].name} of {gib(machine.overhead)})"
    )
    altered = {
        f"runtime.{key}: {str(value).lower()}": settings.with_("runtime", **{key: value})
        for key, value in changes(settings)
    }
    others = {
        text: {stage: plan_stage(stage, one, config, machine) for stage in STAGES} for text, one in altered.items()
    }
    console.print("What a change of one runtime parameter gives; the result stays the same, but for rounding:")
    print_whole(changes_table({"as it is": plans} | others))
    show_needs(settings, machine, config, cached=any(part.name == "base cache" for part in ppo.parts))


def show_needs(settings: Settings, machine: Machine, config: PretrainedConfig, cached: bool) -> None:
    """Room on the disk; and hours, for cards whose rates are known."""
    shape = shape_of(settings, config, cached)
    room = disk(settings, shape, config.tie_word_embeddings)
    console.print(
        f"disk: {gb(room.base)} for the base, {gb(room.adapters)} for adapters with DVC's copy of them, {gb(room.checkpoints)} for checkpoints; "
        f"make export adds {gb(room.export)}. Data, tables and .venv are not in it.",
        markup=False,
    )
    cards = cards_like(machine)
    if cards:
        console.print(
            f"Hours, predicted for rows of full length at {USED:.0%} of the rates of the card's data sheet (docs/recipes.md):"
        )
        print_whole(hours_table({name: hours(settings, shape, rates) for name, rates in cards.items()}))


def hours_table(cards: dict[str, dict[str, float | None]]) -> Table:
    """Cards down, stages across."""
    table = _table("hours", next(iter(cards.values())))
    table.add_column("all", justify="right")
    for name, found in cards.items():
        known = [value for value in found.values() if value is not None]
        whole = f"{sum(known):.1f}" if len(known) == len(found) else "?"
        table.add_row(name, *("?" if value is None else f"{value:.1f}" for value in found.values()), whole)
    return table


def gb(size: int) -> str:
    """For people: as disks are sold."""
    return f"{size / 1e9:.1f} GB"


def parts_table(plans: dict[str, StagePlan], machine: Machine) -> Table:
    """Parts down, stages across, in GiB."""
    table = _table("part, GiB", plans)
    names = dict.fromkeys(part.name for plan in plans.values() for part in plan.parts)
    notes = {part.name: part.note for plan in reversed(plans.values()) for part in plan.parts}
    for name in names:
        sizes = [sum(part.size for part in plan.parts if part.name == name) for plan in plans.values()]
        note = f" ({notes[name]})" if notes[name] and name not in ("adapters", "experience") else ""
        table.add_row(name + note, *(f"{size / GIB:.2f}" if size else "" for size in sizes))
    table.add_row("highest pass", *(f"{plan.highest.size / GIB:.2f}" for plan in plans.values()), end_section=True)
    table.add_row("peak", *(f"{plan.peak / GIB:.2f}" for plan in plans.values()))
    table.add_row(f"of {machine.free / GIB:.2f}", *(verdict(plan, machine) for plan in plans.values()))
    return table


def changes_table(plans: dict[str, dict[str, StagePlan]]) -> Table:
    """Peaks in GiB: changes down, stages across."""
    table = _table("peak, GiB", next(iter(plans.values())))
    for text, of_stages in plans.items():
        table.add_row(text, *(f"{plan.peak / GIB:.2f}" for plan in of_stages.values()))
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _settings(chosen: argparse.Namespace) -> Settings:
    settings = Settings.read(chosen.recipe)
    if chosen.base:
        settings = settings.with_("base", model=chosen.base)
    if chosen.tokens:
        prompt, response = lengths(chosen.tokens)
        settings = settings.with_("tokens", max_prompt=prompt, max_response=response)
    return settings


def lengths(text: str) -> tuple[int, int]:
    """Of prompt and response, from such as 256+256.

    Raises:
        ParameterError: that is no two lengths.
    """
    numbers = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if numbers is None:
        raise ParameterError(
            f"TOKENS is {text!r} but must be two lengths, of prompt and of response, joined by a plus; for example 256+256."
        )
    return int(numbers[1]), int(numbers[2])


if __name__ == "__main__":
    main()
