"""Real files of this field: read whole, or refused in words; and the demo data, which are this project's own."""

import gzip
import json
import re
from collections import Counter

import pytest
from conftest import ROOT, SHARED
from taking import take

from pipeline.data.records import Demonstration, Pair, prompt_key
from pipeline.errors import DataError

FORMATS = SHARED / "data" / "formats"
HH = SHARED / "data" / "hh-rlhf" / "harmless-base-1800.jsonl.gz"
needs_shared = pytest.mark.skipif(not HH.is_file(), reason="../shared/data is not beside this checkout")

COUNTS = {
    "dpo_en_demo.json": (300, "ShareGPT pairs", Pair),
    "dpo_zh_demo.json": (300, "ShareGPT pairs", Pair),
    "alpaca_en_demo.json": (999, "Alpaca instructions", Demonstration),
    "v1_sft_demo.jsonl": (500, "chat messages", Demonstration),
    "v1_dpo_demo.jsonl": (10, "chosen_messages and rejected_messages", Pair),
    "seed_tasks.jsonl": (175, "self-instruct seed tasks", Demonstration),
}


@needs_shared
@pytest.mark.parametrize("name", COUNTS)
def test_format_file_is_read_whole(name: str) -> None:
    rows, title, kind = COUNTS[name]
    records, tally = take(FORMATS / name)
    assert (tally.rows, tally.shapes, tally.rejects) == (rows, {title: rows}, {})
    assert len(records) == rows and all(isinstance(record, kind) for record in records)


@needs_shared
def test_every_format_file_has_a_test() -> None:
    assert {file.name for file in FORMATS.iterdir()} == {*COUNTS, "glaive_toolcall_en_demo.json"}


@needs_shared
def test_tool_calls_are_refused() -> None:
    with pytest.raises(DataError, match=r"glaive_toolcall_en_demo\.json holds conversations with tool calls"):
        take(FORMATS / "glaive_toolcall_en_demo.json")


@needs_shared
def test_chinese_text_is_unchanged() -> None:
    raw = json.loads((FORMATS / "dpo_zh_demo.json").read_text(encoding="utf-8"))
    records, _ = take(FORMATS / "dpo_zh_demo.json")
    assert [record.chosen for record in records] == [row["chosen"]["value"] for row in raw]
    assert [record.prompt[-1].content for record in records] == [row["conversations"][-1]["value"] for row in raw]


@needs_shared
def test_hh_rows_are_all_read_or_named() -> None:
    """Which lines cannot be used is worked out apart from the reader, by cutting the raw strings at their last marker."""
    with gzip.open(HH, "rt", encoding="utf-8") as stream:
        raw = [json.loads(line) for line in stream]
    expected = {}
    for line, row in enumerate(raw, 1):
        (chosen_prompt, _, chosen), (rejected_prompt, _, rejected) = (
            row[side].rpartition("\n\nAssistant:") for side in ("chosen", "rejected")
        )
        if chosen_prompt != rejected_prompt:
            expected[line] = "rejected differs from chosen before the last answer"
        elif not chosen.strip():
            expected[line] = "chosen is empty"
        elif not rejected.strip():
            expected[line] = "rejected is empty"
    records, tally = take(HH)
    assert {reject.line: reject.kind for reject in tally.shown} == expected
    assert (tally.rows, len(records), tally.shapes) == (1800, 1794, {"HH transcripts": 1794})
    longest = max(raw, key=lambda row: row["chosen"].count("\n\nAssistant:"))
    turns = longest["chosen"].count("\n\nAssistant:") + longest["chosen"].count("\n\nHuman:")
    assert max(len(record.prompt) for record in records) == turns - 1 == 35


# --- the demo data ---


def test_demo_data_is_whole() -> None:
    """Written for this project: no reject, no duplicate prompt, and length does not give the label away."""
    records, tally = take(ROOT / "data" / "demo", "pairs")
    assert not tally.rejects
    assert len({prompt_key(row.prompt) for row in records}) == len(records) >= 480
    assert 0.4 <= sum(len(row.chosen) > len(row.rejected) for row in records) / len(records) <= 0.6


def test_no_word_or_opening_of_the_demo_data_tells_chosen_from_rejected() -> None:
    """Of the pairs in which one answer alone has a feature, it is the chosen one in at most 65%, and the rejected one too.

    Features that part fewer than 15 pairs are left out: among so few, a share above 65% comes about by chance.
    """
    in_chosen, in_rejected = Counter(), Counter()
    for row in take(ROOT / "data" / "demo", "pairs")[0]:
        chosen, rejected = features(row.chosen), features(row.rejected)
        in_chosen.update(chosen - rejected)
        in_rejected.update(rejected - chosen)
    told = {}
    for feature in in_chosen | in_rejected:
        parted = in_chosen[feature] + in_rejected[feature]
        if parted >= 15 and max(in_chosen[feature], in_rejected[feature]) / parted > 0.65:
            told[feature] = (in_chosen[feature], in_rejected[feature])
    assert not told


def features(answer: str) -> set[str]:
    """Words, openings of one to three words, punctuation marks, and the number of sentences."""
    words = re.findall(r"[a-z']+", answer.lower())
    openings = {f"opening: {' '.join(words[:size])}" for size in (1, 2, 3) if len(words) >= size}
    marks = {f"mark: {mark}" for mark in '!?:;,()"' if mark in answer}
    sentences = len(re.findall(r"[.!?](?:\s|$)", answer))
    return {*words, *openings, *marks, f"sentences: {sentences}"}
