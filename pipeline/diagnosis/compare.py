"""Numbers of the loop beside the same numbers computed a second time: how far apart, where, and is that too far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Tolerance:
    """A difference deviates where one number is off by more than `largest`, or the root mean square of all by more than `typical`.

    Differences are relative to 1 + |expected|.
    """

    largest: float
    typical: float


ARITHMETIC = Tolerance(1e-4, 1e-5)
"""float32 sums against float64 ones; the inputs are the loop's own, so the precision of the model does not matter."""


@dataclass(frozen=True)
class Precision:
    """How close passes through the model can come, which depends on what it computes in.

    forward: log-probabilities, values, entropies.
    score: a reward model's; its head adds up what all layers have rounded.
    gradient: `largest` of each matrix, `typical` of all together, relative to their size.
    """

    forward: Tolerance
    score: Tolerance
    gradient: Tolerance


PRECISIONS = {
    torch.float32: Precision(Tolerance(1e-3, 2e-4), Tolerance(1e-3, 2e-4), Tolerance(1e-2, 1e-3)),
    # A number has 8 bits. A padded batch, a cached decode and one whole row take other roundings in every layer: single
    # tokens are a tenth of a nat apart, small gradients a third of their size (measured: docs/diagnose.md).
    torch.bfloat16: Precision(Tolerance(0.5, 0.05), Tolerance(1.0, 0.25), Tolerance(1.0, 0.1)),
}


@dataclass(frozen=True)
class Beat:
    """One thing that the loop does, held against a second computation.

    name: `beat: what`, in the words of the table.
    module: where to look.
    found: what the comparison says, one line.
    """

    name: str
    module: str
    found: str
    deviates: bool
    hint: str = ""


def compare(
    name: str,
    module: str,
    found: Rows,
    expected: Rows,
    tolerance: Tolerance,
    what: tuple[str, str] = ("answer", "token"),
) -> Beat:
    """Numbers by answer and token (or other `what`) against expected ones."""
    if [len(row) for row in found] != [len(row) for row in expected]:
        sizes = f"{[len(row) for row in found]} numbers, expected {[len(row) for row in expected]}"
        return Beat(name, module, sizes, deviates=True)
    errors = [
        [abs(f - e) / (1 + abs(e)) for f, e in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(found, expected, strict=True)
    ]
    everything = [(error, row, place) for row, of_row in enumerate(errors) for place, error in enumerate(of_row)]
    if not everything:
        return Beat(name, module, "nothing to compare", deviates=False)
    # NaN compares as false everywhere: it is the worst
    worst, row, place = max(everything, key=lambda entry: math.inf if math.isnan(entry[0]) else entry[0])
    rms = math.sqrt(sum(error**2 for error, _, _ in everything) / len(everything))
    if worst <= tolerance.largest and rms <= tolerance.typical:
        return Beat(name, module, f"within {worst:.1e} (allowed {tolerance.largest:.0e})", deviates=False)
    off = [[not error <= tolerance.largest for error in of_row] for of_row in errors]
    count = sum(map(sum, off))
    line = (
        f"{what[0]} {row + 1}, {what[1]} {place + 1}: {found[row][place]:.5g} where {expected[row][place]:.5g} is right; "
        f"{count} of {len(everything)} numbers are off{_pattern(off)}"
        if count
        else f"off by {rms:.1e} on average (allowed {tolerance.typical:.0e})"
    )
    return Beat(name, module, line, deviates=True)


def explained(beat: Beat, found: Rows, guesses: dict[str, Callable[[], Rows]], tolerance: Tolerance) -> Beat:
    """The same beat; where it deviates and a guess gives the numbers that were found, with that guess as a hint."""
    if beat.deviates:
        for guess, rows in guesses.items():
            if not compare(beat.name, beat.module, found, rows(), tolerance).deviates:
                return replace(beat, hint=f"the numbers are those of {guess}")
    return beat


def _pattern(off: list[list[bool]]) -> str:
    """Where in an answer the deviating numbers stand, if that says something."""
    long = [row for row in off if len(row) > 2 and any(row)]
    if not long:
        return ""
    if all(row[-1] and not any(row[:-1]) for row in long):
        return ", at the last token alone"
    if all(row[0] and not any(row[1:]) for row in long):
        return ", at the first token alone"
    if all(not row[-1] and all(row[:-1]) for row in long):
        return ", at all but the last token"
    return ""
