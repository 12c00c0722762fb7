"""The items of one large JSON array, one at a time: neither the text nor the items are ever in memory all at once."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from pipeline.data.rows import JSON, MAX_ROW, RepeatedField

CHUNK = 2**20
SPACE = re.compile(r"[ \t\r\n]*")


def array_items(stream: TextIO) -> Iterator[Any]:
    """The items of the array that the stream holds.

    Raises:
        ValueError: it holds no whole array; the message says at which item it breaks off.
        RecursionError: an item is nested too deep.
    """
    text, at = _more(stream, "", 0)
    if text[at : at + 1] != "[":
        raise ValueError("it does not begin with [")
    text, at = _more(stream, text, at + 1)
    if text[at : at + 1] == "]":
        _check_end(stream, text[at + 1 :])
        return
    number = 1
    while True:
        try:
            item, end = JSON.raw_decode(text, at)
            end = _skip_space(text, end)
            # a number at the end of what was read may go on in what was not
            fault = None if end < len(text) else "it ends there"
        except RepeatedField as error:
            raise ValueError(f"item {number} {error}") from None
        except json.JSONDecodeError as error:
            fault = error.msg
        if fault is not None:
            longer, start = _more(stream, text, at)
            if len(longer) - start > MAX_ROW or len(longer) - start == len(text) - at:
                raise ValueError(f"item {number} is broken: {fault}")
            text, at = longer, start
            continue
        yield item
        number += 1
        if text[end] == "]":
            _check_end(stream, text[end + 1 :])
            return
        if text[end] != ",":
            raise ValueError(f"there is no comma before item {number}")
        at = _skip_space(text, end + 1)


def _more(stream: TextIO, text: str, at: int) -> tuple[str, int]:
    """The text from `at` on with as much again added, and where its first character that is no space stands."""
    text = text[at:]
    text += stream.read(max(CHUNK, len(text)))
    return text, _skip_space(text, 0)


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()


def _check_end(stream: TextIO, rest: str) -> None:
    if (rest + stream.read(CHUNK)).strip():
        raise ValueError("something follows the array's end")
