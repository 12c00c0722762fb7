"""A stage's curve, as rules read it: one row of named figures per step, the same rows that plots/STAGE.tsv holds.

A figure that a row lacks, or that is not finite, reads as NaN. Every comparison with NaN is false, so a rule that needs a
figure that is not there (a critic's, in an algorithm without one) finds nothing.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

Row = Mapping[str, object]
Curve = Sequence[Row]

RECENT = 3  # rows: one odd rollout is chance, three in a row are a state


def number(row: Row, name: str) -> float:
    """A figure of a row; NaN where it is missing or not finite."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def values(rows: Curve, name: str) -> list[float]:
    """A figure of each row."""
    return [number(row, name) for row in rows]


def mean(numbers: Sequence[float]) -> float:
    """NaN where there are none, or where one is NaN."""
    return sum(numbers) / len(numbers) if numbers else math.nan


def first(curve: Curve, name: str) -> float:
    """A figure at the first step, when the model is still the one that the stage started from."""
    return number(curve[0], name)


def last(curve: Curve, name: str) -> float:
    """A figure at the last step."""
    return number(curve[-1], name)


def recent(curve: Curve, name: str) -> float:
    """The mean of a figure over the last three steps, the first step left out; NaN where there are fewer."""
    return mean(values(curve[-RECENT:], name)) if len(curve) > RECENT else math.nan


def always(curve: Curve, name: str, rows: int = RECENT) -> list[float]:
    """A figure of the last `rows` steps; one NaN where there are fewer."""
    return values(curve[-rows:], name) if len(curve) >= rows else [math.nan]


def rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """How far the mean has risen between two windows of equal size, and the standard error of that.

    The variance of one value is half the mean squared difference of neighbours (von Neumann 1941), which a trend within
    the windows hardly touches.
    """
    steps = [y - x for window in (before, after) for x, y in pairwise(window)]
    variance = mean([step * step for step in steps]) / 2
    return mean(after) - mean(before), math.sqrt(2 * variance / len(after)) if after else math.nan


def read_curve(file: Path) -> list[Row]:
    """The rows of plots/STAGE.tsv; a cell that is empty is not in its row."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [{name: _value(cell) for name, cell in row.items() if cell} for row in rows]


def _value(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
