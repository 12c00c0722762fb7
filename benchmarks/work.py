"""The work that both sides do. Both environments import this, so it needs nothing but Python's own library."""

import random
from dataclasses import asdict, dataclass
from typing import Any

FIRST_ORDINARY = 20  # token ids below it are special in the embedded model, or may be


@dataclass(frozen=True)
class Work:
    """A PPO iteration: answers of exactly `response` tokens to `rows` prompts, then `epochs` optimizer steps on all rows at once.

    Rank `lora_r` on every linear layer, bfloat16, `threads` CPU threads. `iterations` are measured, after `warmup` that are not.
    Prompts are of random tokens up to `highest_id`.
    """

    rows: int = 16
    prompt: int = 40
    response: int = 24
    epochs: int = 2
    lora_r: int = 16
    threads: int = 2
    warmup: int = 1
    iterations: int = 1
    highest_id: int = 40_000

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, prompt and answer."""
        return self.prompt + self.response

    @property
    def updated_tokens(self) -> int:
        """Tokens that go through forward and backward in one iteration, prompts included."""
        return self.epochs * self.rows * self.row_tokens

    def request(self, **more: Any) -> dict[str, Any]:
        """As a process of either side is told it."""
        return {"work": asdict(self), **more}


def prompt_ids(work: Work, iteration: int) -> list[list[int]]:
    """Prompts of random ordinary tokens, the same on both sides; [rows][prompt]."""
    numbers = random.Random(iteration)
    return [[numbers.randint(FIRST_ORDINARY, work.highest_id) for _ in range(work.prompt)] for _ in range(work.rows)]


def spread_lengths(rows: int, shortest: int, longest: int) -> list[int]:
    """Response lengths at equal distances, from shortest to longest, in an order that is neither rising nor falling."""
    lengths = [shortest + round(row * (longest - shortest) / (rows - 1)) for row in range(rows)]
    return random.Random(0).sample(lengths, rows)
