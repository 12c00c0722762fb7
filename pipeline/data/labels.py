"""Whether length alone tells the chosen from the rejected answer: what a reward model would learn first."""

from collections import Counter

from pipeline.data.records import Pair

WARNING_SHARE = 0.65  # accuracy of length alone from which a reward model can do well without reading


def longer(pair: Pair) -> int:
    """1 where the chosen answer is the longer one, in characters, -1 where the rejected one is, 0 where they are equal."""
    return (len(pair.chosen) > len(pair.rejected)) - (len(pair.chosen) < len(pair.rejected))


def label_figures(signs: Counter[int]) -> dict[str, float]:
    """Shares of a count of `longer` over pairs; all 0 where there are no pairs.

    `length_alone_accuracy` is that of "the longer is better" or its opposite, whichever is more often right; a tie counts half.
    """
    total = signs.total()
    share = (signs[1] + signs[0] / 2) / total if total else 0.0
    return {
        "pairs": total,
        "chosen_longer_share": signs[1] / total if total else 0.0,
        "rejected_longer_share": signs[-1] / total if total else 0.0,
        "length_alone_accuracy": max(share, 1 - share) if total else 0.0,
    }


def length_tells(figures: dict[str, float]) -> bool:
    """Whether length alone is right for WARNING_SHARE of the pairs or more, and two standard errors above chance."""
    accuracy, pairs = figures["length_alone_accuracy"], figures["pairs"]
    return accuracy >= WARNING_SHARE and accuracy - 2 * 0.5 / pairs**0.5 > 0.5
