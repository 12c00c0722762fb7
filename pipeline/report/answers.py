"""Which answers are shown: a few that stand for all, losses and gains alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.health.curve import Row

SHOWN = 12


@dataclass(frozen=True)
class Answer:
    """What one model said, and what it scored by the reward of training and by the judge."""

    role: str
    text: str
    reward: float
    judge: float


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answers: before training, after it, and the bare base's."""

    prompt: str
    before: Answer
    after: Answer
    base: Answer

    @property
    def gain(self) -> float:
        """By how much the judge likes the answer after training better."""
        return self.after.judge - self.before.judge


def representative(rows: Sequence[Row], trained: str, count: int = SHOWN) -> list[Exchange]:
    """`count` exchanges at equal distances along the judge's gain, from the largest loss to the largest gain.

    So nobody has picked the good ones; the median is as likely to be seen as either end.
    """
    ranked = sorted((_exchange(row, trained) for row in rows), key=lambda exchange: exchange.gain)
    if len(ranked) <= count:
        return ranked
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def _exchange(row: Row, trained: str) -> Exchange:
    said = {
        role: Answer(role, str(row[role]), float(row[f"{role}_reward"]), float(row[f"{role}_judge"]))
        for role in ("sft", trained, "base")
    }
    return Exchange(str(row["prompt"]), said["sft"], said[trained], said["base"])
