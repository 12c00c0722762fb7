"""The parts as the stages want them: demonstrations for sft, prompts for ppo, pairs for all others."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from pipeline.data.records import PromptOnly, Record, as_demonstration, prompt_key


def for_part(part: str, records: Iterable[Record]) -> Iterator[Record]:
    """The records of a part, the same prompts standing together, as that part's stage reads them.

    A chosen answer that is in several pairs is one demonstration, and a prompt that has several answers is one prompt.
    """
    if part not in ("sft", "ppo"):
        yield from records
        return
    for _, alike in groupby(records, key=lambda record: prompt_key(record.prompt)):
        if part == "sft":
            yield from dict.fromkeys(map(as_demonstration, alike))
        else:
            yield PromptOnly(next(alike).prompt)
