"""The table of docs/recipes.md that is computed: what the recipes for a GPU need. `python -m tests.recipe_needs` writes it."""

from functools import cache
from pathlib import Path

from pipeline.plan import gb
from pipeline.planning.bases import configuration
from pipeline.planning.fitting import gib, verdict
from pipeline.planning.needs import cards_like, disk, hours, shape_of
from pipeline.planning.settings import Settings, card
from pipeline.planning.stages import StagePlan, plan_stage

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/recipes.md"
CARDS = {"qwen2.5-0.5b": "8GB", "mistral-7b-24gb": "24GB", "qwen2.5-7b-24gb": "24GB", "llama-3.1-8b-48gb": "48GB"}
STAGES = ("sft", "reward", "judge", "ppo", "evaluate")
BEGIN, END = "<!-- python -m tests.recipe_needs: begin -->\n", "<!-- end -->\n"
HEAD = (
    "| recipe | card | highest peak, GiB | disk | hours, all stages |\n"
    "|---|---|---|---|---|\n"
)  # fmt: skip


@cache
def plans(recipe: str) -> dict[str, StagePlan]:
    """Of each stage, on the card that the recipe is for."""
    settings = Settings.read(ROOT / f"recipes/{recipe}.yaml")
    config = configuration(settings.base.model)
    return {stage: plan_stage(stage, settings, config, card(CARDS[recipe])) for stage in STAGES}


def verdicts(recipe: str) -> dict[str, str]:
    """Whether each stage fits."""
    return {stage: verdict(plan, card(CARDS[recipe])) for stage, plan in plans(recipe).items()}


def table() -> str:
    """A row for each recipe."""
    return HEAD + "".join(map(_row, CARDS))


def _row(recipe: str) -> str:
    settings, machine = Settings.read(ROOT / f"recipes/{recipe}.yaml"), card(CARDS[recipe])
    config = configuration(settings.base.model)
    stage, highest = max(plans(recipe).items(), key=lambda item: item[1].peak)
    cached = any(part.name == "base cache" for part in plans(recipe)["ppo"].parts)
    shape = shape_of(settings, config, cached)
    room = disk(settings, shape, config.tie_word_embeddings)
    times = [
        f"{sum(filter(None, hours(settings, shape, rates).values())):.1f} ({name})"
        for name, rates in cards_like(machine).items()
    ]
    return (
        f"| `{recipe}` | {CARDS[recipe]} | {gib(highest.peak).removesuffix(' GiB')} ({stage}) | "
        f"{gb(room.base + room.adapters + room.checkpoints)}, with `make export` {gb(room.export)} more | {', '.join(times) or '-'} |\n"
    )


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), table()), encoding="utf-8")
