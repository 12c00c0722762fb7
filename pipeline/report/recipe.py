"""Parameters that are not what they were, or not what a recipe says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.params.section import read_params


@dataclass(frozen=True)
class Change:
    """A parameter with two values; None where one side lacks it."""

    key: str
    before: Any
    after: Any


def leaves(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values that are no mappings, by dotted key."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What differs; `runtime`, which changes no result, left out."""
    left, right = leaves(before), leaves(after)
    keys = [key for key in dict.fromkeys((*left, *right)) if not key.startswith("runtime.")]
    return [Change(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def nearest_recipe(recipes: Sequence[Path], params: Mapping[str, Any]) -> tuple[str, list[Change]] | None:
    """The recipe that the parameters differ from in the fewest values, with those; None where there is no recipe."""
    found = [(recipe.stem, changes(read_params(recipe), params)) for recipe in sorted(recipes)]
    return min(found, key=lambda named: len(named[1]), default=None)
