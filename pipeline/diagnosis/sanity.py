"""Rung 5: does the reward model tell good answers from bad ones? It is asked about pairs that it was not trained on.

Axes: B pairs.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.data.examples import sequences
from pipeline.data.records import Pair
from pipeline.data.tokenization import ChatTokenizer
from pipeline.roles import RewardModel

CHANCE = 1.64  # standard deviations above one half: one-sided 5%
NO_SPREAD = 1e-3


@dataclass(frozen=True)
class Kind:
    """One kind of answer: its scores, and the share of pairs whose chosen answer scores above it."""

    name: str
    mean: float
    std: float
    chosen_above: float


@dataclass(frozen=True)
class Sanity:
    """What the reward model says of each kind of answer to the same prompts."""

    pairs: int
    kinds: list[Kind]

    @property
    def limit(self) -> float:
        """What an accuracy must reach to be more than chance on so many pairs."""
        return 0.5 + CHANCE * math.sqrt(0.25 / self.pairs)

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, in words: it must tell rejected answers for sure, and may prefer no kind to the chosen ones."""
        others = self.kinds[1:]
        if all(kind.std < NO_SPREAD for kind in self.kinds):
            return ["its scores have no spread: every answer gets the same"]
        found = []
        for kind in others:
            if kind.name == "rejected" and kind.chosen_above < 1 - self.limit:
                found.append(f"{self._seen(kind)}: it prefers the rejected; are the two mixed up in the data?")
            elif kind.name == "rejected" and kind.chosen_above < self.limit:
                found.append(f"{self._seen(kind)}; {self.limit:.0%} would be more than chance")
            elif kind.chosen_above < 0.5:
                found.append(f"{self._seen(kind)}: PPO will find that out")
        return found

    @property
    def doubts(self) -> list[str]:
        """What so few pairs cannot tell."""
        return [
            f"Reward model: {self._seen(kind)}, which may be chance; {self.limit:.0%} would not be."
            for kind in self.kinds[1:]
            if kind.name != "rejected" and 0.5 <= kind.chosen_above < self.limit
        ]

    def _seen(self, kind: Kind) -> str:
        return f"chosen beats {kind.name} in {kind.chosen_above:.0%} of {self.pairs} pairs"


def check_reward_model(model: RewardModel, pairs: Sequence[Pair], tokenizer: ChatTokenizer, size: int) -> Sanity:
    """Scores of chosen, rejected, shuffled, empty and copied answers to the prompts of `pairs`.

    shuffled: the words of the chosen answer in another order; empty: the end token alone; copied: the last message of the
    prompt as the answer.
    """
    generator = random.Random(0)  # nosec B311  # guards no secret

    def shuffled(text: str) -> str:
        words = text.split()
        generator.shuffle(words)
        return " ".join(words)

    answers = {
        "chosen": [pair.chosen for pair in pairs],
        "rejected": [pair.rejected for pair in pairs],
        "shuffled": [shuffled(pair.chosen) for pair in pairs],
        "empty": ["" for _ in pairs],
        "copied": [pair.prompt[-1].content for pair in pairs],
    }
    scores: dict[str, Tensor] = {}
    for name, texts in answers.items():
        rows = []
        for pair, text in zip(pairs, texts, strict=True):
            ids, was_cut = tokenizer.response_ids(text)
            # an end token also after an answer that is too long, as PPO puts one: the score is read there
            rows.append((tokenizer.prompt_ids(pair.prompt), [*ids, tokenizer.end_id] if was_cut else ids))
        scores[name] = model.score_all(sequences(rows), size)
    chosen_B = scores["chosen"]
    kinds = [
        Kind(
            name,
            float(of_kind_B.mean()),
            float(of_kind_B.std(correction=0)),
            float(((chosen_B > of_kind_B).float() + 0.5 * (chosen_B == of_kind_B).float()).mean()),
        )
        for name, of_kind_B in scores.items()
    ]
    return Sanity(len(pairs), kinds)
