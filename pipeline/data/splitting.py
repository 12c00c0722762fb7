"""Dividing pairs by prompt: no prompt, not even one that differs in case or spacing, is in two parts."""

from collections import defaultdict

from pipeline.data.records import Pair, prompt_key
from pipeline.errors import DataError
from pipeline.params.data import SplitParams

PARTS = ("heldout", "development", "sft", "reward", "judge", "ppo")


def split_pairs(pairs: list[Pair], split: SplitParams, max_prompts: int | None) -> dict[str, list[Pair]]:
    """The pairs of each of PARTS; which part a prompt is in depends on the set of prompts, not on their order.

    Prompts are ranked by the hash of their normalised text, so that the sizes are exact.

    Raises:
        DataError: too few prompts for the parts asked for.
    """
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[prompt_key(pair.prompt)].append(pair)
    keys = sorted(groups)[:max_prompts]
    trainable = len(keys) - split.heldout - split.development
    if trainable < len(PARTS) - 2:
        raise DataError(
            f"The data has {len(keys)} different prompts, but data.split.heldout {split.heldout} and data.split.development "
            f"{split.development} leave {max(trainable, 0)} to train on; lower these two, or bring more data."
        )
    shares = [split.sft, split.reward, split.judge, split.ppo]
    bounds = [0, split.heldout, split.heldout + split.development]
    bounds += [bounds[2] + round(trainable * sum(shares[: count + 1])) for count in range(len(shares))]
    parts = {}
    for part, start, end in zip(PARTS, bounds[:-1], bounds[1:], strict=True):
        parts[part] = [pair for key in keys[start:end] for pair in sorted(groups[key], key=_order)]
        if not parts[part]:
            raise DataError(
                f"The data has {len(keys)} different prompts: too few to give the part {part} any; adjust data.split, or bring more data."
            )
    return parts


def _order(pair: Pair) -> tuple[str, ...]:
    return (*(message.content for message in pair.prompt), pair.chosen, pair.rejected)
