"""`make check-data DATA=path`: what `prepare` would make of a file, a folder or a hub data set; nothing is written.

Exit status 1 where the data are refused as a whole or no row can be used.
"""

import sys
from array import array
from collections import Counter

import numpy as np

from pipeline.data.intake import Tally, check_share, take_in
from pipeline.data.labels import label_figures, length_tells, longer
from pipeline.data.recognition import Rules
from pipeline.data.records import Pair, Record, group_key
from pipeline.data.shapes import SHAPES
from pipeline.errors import DataError, UserError
from pipeline.progress import console

NAMES = {"Pair": "pairs", "Demonstration": "demonstrations", "PromptOnly": "prompts without answers"}


def check_data(path: str, shape: str) -> None:
    """Says which shapes the files have, what cannot be used and why, and whether the labels look sound.

    Raises:
        DataError: the data are refused, or no row can be used.
    """
    if shape != "auto" and shape not in SHAPES:
        raise DataError(f"SHAPE is {shape!r} but must be one of {', '.join(SHAPES)}, or be left out.")
    groups = array("Q")
    signs: Counter[int] = Counter()

    def look(records: tuple[Record, ...]) -> None:
        for record in records:
            groups.append(int(group_key(record.prompt)[:16], 16))
            if isinstance(record, Pair):
                signs[longer(record)] += 1

    # whoever names the shape of ranked answers asks for them to be expanded
    tally = take_in("DATA", path, None, Rules(shape, expand_rankings=shape.endswith("-ranked")), look)
    check_share(tally, "DATA", path, max_bad_share=1.0)
    for line in _summary(tally, len(np.unique(groups)), label_figures(signs)):
        console.print(line, markup=False)


def _summary(tally: Tally, prompts: int, labels: dict[str, float]) -> list[str]:
    held = ", ".join(f"{count:,} {NAMES[kind]}" for kind, count in tally.records.items())
    bad = tally.rejects.total()
    lines = [f"{tally.rows:,} rows hold {held}, with {prompts:,} different prompts."]
    if bad:
        lines.append(f"{bad:,} rows ({bad / tally.rows:.2%}) cannot be used:")
        lines += [f"{count:>9,}  {kind}" for kind, count in tally.rejects.most_common()]
    if tally.left_out:
        lines.append(f"{tally.left_out:,} answers have loss weight 0 and are left out.")
    if labels["pairs"]:
        lines.append(f"The chosen answer is the longer one in {labels['chosen_longer_share']:.0%} of the pairs.")
        if length_tells(labels):
            lines.append("WARNING: length alone tells chosen from rejected; a reward model will learn that first.")
    return lines


def main() -> None:
    """Arguments: a path or hub name, and a shape where one is to be named."""
    try:
        if len(sys.argv) not in (2, 3):
            raise DataError(
                "Name the data, and where one is to be named a shape: make check-data DATA=path SHAPE=name."
            )
        check_data(sys.argv[1], *(sys.argv[2:] or ["auto"]))
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
