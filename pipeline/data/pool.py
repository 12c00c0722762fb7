"""Records on disk, their keys in memory: 41 bytes for each, whatever its length."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from pipeline.data.prepared import from_line, to_line
from pipeline.data.records import Demonstration, Pair, PromptOnly, Record, group_key, prompt_key

KIND_OF = {Pair: 0, Demonstration: 1, PromptOnly: 2}  # the places of shapes.KINDS


@dataclass(frozen=True)
class Index:
    """What dividing needs to know of N records. Hashes are the first 64 bits of longer ones.

    prompts_N: hash of the prompt; records are ranked by it.
    groups_N: hash of the prompt, equal for prompts that are only written differently.
    contents_N: hash of the whole record, equal for repeated ones.
    kinds_N: 0 pair, 1 demonstration, 2 prompt alone.
    rows_N: number of the row that the record came from; the records of one row go together.
    """

    prompts_N: np.ndarray
    groups_N: np.ndarray
    contents_N: np.ndarray
    kinds_N: np.ndarray
    rows_N: np.ndarray


class Pool:
    """All records of a run, in the order in which they came; their texts lie in `file`, which can be read and written."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._offsets, self._size = array("Q"), 0
        self._prompts, self._groups, self._contents, self._rows = (array("Q") for _ in range(4))
        self._kinds = array("B")
        self._row = 0

    def add(self, records: Iterable[Record]) -> None:
        """Adds the records of one row."""
        for record in records:
            line = to_line(record).encode()
            self._offsets.append(self._size)
            self._size += self._file.write(line)
            self._prompts.append(_first_64_bits(prompt_key(record.prompt)))
            self._groups.append(_first_64_bits(group_key(record.prompt)))
            self._contents.append(_first_64_bits(hashlib.sha256(line).hexdigest()))
            self._kinds.append(KIND_OF[type(record)])
            self._rows.append(self._row)
        self._row += 1

    def index(self) -> Index:
        """The keys of all records."""
        columns = (self._prompts, self._groups, self._contents, self._kinds, self._rows)
        return Index(*(np.array(column) for column in columns))

    def read(self, numbers_N: np.ndarray) -> Iterator[Record]:
        """The records of these numbers, in the order given."""
        for number in numbers_N:
            self._file.seek(self._offsets[number])
            yield from_line(self._file.readline().decode())


def _first_64_bits(hexadecimal: str) -> int:
    return int(hexadecimal[:16], 16)
