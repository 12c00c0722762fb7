"""Dividing records by prompt: no prompt, not even one that is only written differently, is in two parts.

Records whose prompts are alike, and records of one conversation, are one group. Groups are ranked by the hash of their
prompt, so that the sizes are exact and neither the order of rows nor of files matters.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pipeline.data.pool import Index
from pipeline.data.shapes import KINDS, PAIRS
from pipeline.errors import DataError
from pipeline.params.data import SplitParams

PARTS = ("heldout", "development", "sft", "reward", "judge", "ppo")
SHARED_OUT = PARTS[2:]


@dataclass(frozen=True)
class Division:
    """parts: the numbers of each part's records, in order. duplicates, left_out: counts, the latter by kind and reason."""

    parts: dict[str, np.ndarray]
    prompts: dict[str, int]
    prompts_in_two_parts: int
    duplicates: int
    left_out: dict[str, int]


def divide(index: Index, sources: dict[str, str], split: SplitParams, max_prompts: int | None) -> Division:
    """The records of each of PARTS.

    Args:
        sources: of each part the kind of record that it is made of.

    Raises:
        DataError: too few prompts for the parts asked for.
    """
    groups_N = rank_groups(index)
    has_GK = np.zeros((groups_N.max() + 1, len(KINDS)), dtype=bool)
    has_GK[groups_N, index.kinds_N] = True
    parts_G = assign(has_GK, sources, split, max_prompts)

    repeated_N = _repeated(index)
    parts_N = parts_G[groups_N]
    wanted_N = np.zeros(len(groups_N), dtype=bool)
    for number, part in enumerate(PARTS):
        wanted_N |= (parts_N == number) & (index.kinds_N == KINDS.index(sources[part]))
    used_N = wanted_N & ~repeated_N
    order_N = np.lexsort((index.contents_N, index.prompts_N, groups_N))
    parts = {part: order_N[(used_N & (parts_N == number))[order_N]] for number, part in enumerate(PARTS)}
    keys = [np.unique(index.groups_N[numbers]) for numbers in parts.values()]
    return Division(
        parts,
        {part: len(np.unique(index.prompts_N[numbers])) for part, numbers in parts.items()},
        sum(map(len, keys)) - len(np.unique(np.concatenate(keys))),
        int(repeated_N.sum()),
        _left_out(parts_N, index.kinds_N, ~wanted_N & ~repeated_N),
    )


def rank_groups(index: Index) -> np.ndarray:
    """The rank of each record's group, 0 for the group with the smallest hash; [N]."""
    keys_U, places_N = np.unique(index.groups_N, return_inverse=True)
    same_row = index.rows_N[1:] == index.rows_N[:-1]
    links = (places_N[:-1][same_row], places_N[1:][same_row])
    graph = coo_array((np.ones(len(links[0]), dtype=bool), links), shape=(len(keys_U), len(keys_U)))
    count, labels_U = connected_components(graph, directed=False)
    labels_N = labels_U[places_N]
    smallest_G = np.full(count, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest_G, labels_N, index.prompts_N)
    ranks_G = np.empty(count, dtype=np.int64)
    ranks_G[np.argsort(smallest_G, kind="stable")] = np.arange(count)
    return ranks_G[labels_N]


def assign(has_GK: np.ndarray, sources: dict[str, str], split: SplitParams, max_prompts: int | None) -> np.ndarray:
    """The place in PARTS of each group, -1 for those beyond `max_prompts`; [G].

    Held-out and development prompts come from groups with pairs. The other groups are divided among the parts that they
    have the records for, by the shares of these parts.

    Args:
        has_GK: whether group G, by rank, has records of kind K.

    Raises:
        DataError: too few groups for the parts asked for.
    """
    within = len(has_GK) if max_prompts is None else min(max_prompts, len(has_GK))
    with_pairs = np.flatnonzero(has_GK[:within, KINDS.index(PAIRS)])
    trainable = len(with_pairs) - split.heldout - split.development
    if trainable < sum(sources[part] == PAIRS for part in SHARED_OUT):
        raise DataError(
            f"The data has {len(with_pairs)} different prompts with pairs, but data.split.heldout {split.heldout} and "
            f"data.split.development {split.development} leave {max(trainable, 0)} to train on; lower these two, or bring more data."
        )
    parts_G = np.full(len(has_GK), -1, dtype=np.int8)
    parts_G[with_pairs[: split.heldout]] = PARTS.index("heldout")
    parts_G[with_pairs[split.heldout : split.heldout + split.development]] = PARTS.index("development")

    rest = np.flatnonzero(parts_G[:within] == -1)
    serves_RP = has_GK[rest][:, [KINDS.index(sources[part]) for part in SHARED_OUT]]
    for pattern_P in np.unique(serves_RP, axis=0):
        alike = rest[(serves_RP == pattern_P).all(axis=1)]
        able = [part for part, can in zip(SHARED_OUT, pattern_P, strict=True) if can]
        shares = [getattr(split, part) for part in able]
        bounds = [0] + [round(len(alike) * sum(shares[: count + 1]) / sum(shares)) for count in range(len(able))]
        for part, start, end in zip(able, bounds[:-1], bounds[1:], strict=True):
            parts_G[alike[start:end]] = PARTS.index(part)
    for number, part in enumerate(PARTS):
        if not (parts_G == number).any():
            raise DataError(
                f"The data has {within} different prompts: too few to give the part {part} any; adjust data.split, or bring more data."
            )
    return parts_G


def _repeated(index: Index) -> np.ndarray:
    """Which records are the same as an earlier one; [N]."""
    repeated_N = np.ones(len(index.contents_N), dtype=bool)
    repeated_N[np.unique(index.contents_N, return_index=True)[1]] = False
    return repeated_N


def _left_out(parts_N: np.ndarray, kinds_N: np.ndarray, unused_N: np.ndarray) -> dict[str, int]:
    reasons = {
        "beyond_max_prompts": parts_N == -1,
        "held_out": (parts_N == 0) | (parts_N == 1),
        "prompt_in_another_part": parts_N > 1,
    }
    counts = {
        f"{kind}_{reason}": int((unused_N & which_N & (kinds_N == number)).sum())
        for number, kind in enumerate(KINDS)
        for reason, which_N in reasons.items()
    }
    return {name: count for name, count in counts.items() if count}
