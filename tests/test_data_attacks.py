"""Rows and files that once were misread, or lost in part, without a word."""

import json
from pathlib import Path
from typing import Any

import pytest
from taking import assistant, chat, pair, system, take, user, write_rows

from pipeline.data.records import Demonstration, Pair, Record

A = {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
HH = "\n\nHuman: hi\n\nAssistant: "
NOT_HELD = "chosen is a conversation in which the prompt does not occur"
WRITTEN = "is a list written as text; export the data as jsonl or parquet"

WHOLE: dict[str, tuple[dict[str, Any], list[Record]]] = {
    "turns after the prompt": (
        {"prompt": chat("q"), "completion": chat("q", "a", "r", "b")[1:]},
        [Demonstration((user("q"),), "a"), Demonstration((user("q"), assistant("a"), user("r")), "b")],
    ),
    "turns that repeat the prompt": (
        {"prompt": "q", "response": chat("q", "a", "r", "b")},
        [Demonstration((user("q"),), "a"), Demonstration((user("q"), assistant("a"), user("r")), "b")],
    ),
    "system turn in the completion": (
        {"prompt": "q", "completion": [S, *chat("q", "a")]},
        [Demonstration((system("s"), user("q")), "a")],
    ),
    "transcripts beside their prompt": (
        {"prompt": HH.rstrip(), "chosen": HH + "good", "rejected": HH + "bad"},
        [pair("hi", "good", "bad")],
    ),
    "transcripts beside their question": (
        {"prompt": "hi", "chosen": HH + "good", "rejected": HH + "bad"},
        [pair("hi", "good", "bad")],
    ),
    "system field of an OpenAI pair": (
        {"system": "s", "input": {"messages": chat("q")}, "preferred_output": [A], "non_preferred_output": [{**A, "content": "b"}]},
        [Pair((system("s"), user("q")), "a", "b")],
    ),
    "system field of a seed task": (
        {"system": "s", "instruction": "q", "instances": [{"input": "", "output": "a"}]},
        [Demonstration((system("s"), user("q")), "a")],
    ),
    "system field, and sides that repeat the question alone": (
        {"system": "s", "prompt": "q", "chosen": chat("q", "a"), "rejected": chat("q", "b")},
        [Pair((system("s"), user("q")), "a", "b")],
    ),
    "null loss_weight beside a weight": (
        {"messages": [*chat("q"), {**A, "loss_weight": None, "weight": 0}, *chat("r"), {**A, "loss_weight": None, "weight": 1}]},
        [Demonstration((user("q"), assistant("a"), user("r")), "a")],
    ),
    "null role beside from": (
        {"messages": [{"role": None, "content": None, "from": who, "value": text} for who, text in (("human", "q"), ("gpt", "a"))]},
        [Demonstration((user("q"),), "a")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_of_the_row_is_lost(name: str, tmp_path: Path) -> None:
    row, records = WHOLE[name]
    found, tally = take(write_rows(tmp_path / "rows.jsonl", row))
    assert (found, tally.rejects) == (records, {})


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "transcript of another prompt": ({"prompt": "other", "chosen": HH + "good", "rejected": HH + "bad"}, NOT_HELD),
    "two system fields": (
        {"system": "s", "system_prompt": "t", "prompt": "q", "completion": "a"},
        "system_prompt is there beside another system turn; leave one of them out",
    ),
    "Python's messages as text": (
        {"prompt": "q", "chosen": str(chat("q", "a")), "rejected": str(chat("q", "b"))},
        f"chosen {WRITTEN}",
    ),
    "messages as JSON text": ({"messages": json.dumps(chat("q", "a"))}, f"messages {WRITTEN}"),
    "prompt as JSON text": ({"prompt": json.dumps(chat("q")), "completion": "a"}, f"prompt {WRITTEN}"),
    "texts as JSON text": ({"prompt": '["q"]', "completion": '["a"]'}, f"prompt {WRITTEN}"),
    "ShareGPT prompt as JSON text": (
        {"conversations": '[{"from": "human", "value": "q"}]', "chosen": "a", "rejected": "b"},
        f"conversations {WRITTEN}",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_read_rightly_is_rejected(name: str, tmp_path: Path) -> None:
    row, reason = REJECTED[name]
    assert take(write_rows(tmp_path / "rows.jsonl", row))[1].rejects == {reason: 1}


def test_an_answer_may_be_a_list_in_json(tmp_path: Path) -> None:
    row = {"prompt": "Three primes as JSON", "completion": '["2", "3", "5"]'}
    assert len(take(write_rows(tmp_path / "rows.jsonl", row))[0]) == 1
