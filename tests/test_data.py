"""From raw rows to token ids."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, SHARED

from pipeline.data.examples import prompt_batches, prompts
from pipeline.data.intake import read_all, report_rejects
from pipeline.data.prepared import read_pairs, write_pairs
from pipeline.data.records import BadRow, Message, Pair, prompt_key, to_pair
from pipeline.data.splitting import PARTS, split_pairs
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import DataError
from pipeline.params.data import SplitParams

HH = SHARED / "data" / "hh-rlhf" / "harmless-base-1800.jsonl.gz"
DPO_EN = SHARED / "data" / "formats" / "dpo_en_demo.json"
needs_shared = pytest.mark.skipif(not HH.is_file(), reason="../shared/data is not beside this checkout")


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> Pair:
    return Pair((Message("user", prompt),), chosen, rejected)


SPLIT = SplitParams(heldout=3, development=2, sft=0.3, reward=0.3, judge=0.2, ppo=0.2)


# --- rows ---

SHAPES = {
    "strings": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt with chosen and rejected"),
    "messages apart": (
        {
            "prompt": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "b"}],
        },
        "prompt with chosen and rejected",
    ),
    "messages inside": (
        {
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
        },
        "pairs of conversations",
    ),
    "prompt beside messages inside": (
        {
            "prompt": "q",
            "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
        },
        "pairs of conversations",
    ),
    "ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "ShareGPT pairs",
    ),
    "HH": ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "HH transcripts"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_is_recognised(name: str) -> None:
    row, shape = SHAPES[name]
    assert to_pair(row) == (pair("q", "a", "b"), shape)


def test_transcripts_are_split_at_their_last_shared_turn() -> None:
    """Report huggingface/trl#1858: not at the first assistant's turn."""
    shared = "\n\nHuman: Pick a fruit\n\nAssistant: Sure.\n\nHuman: Which?\n\nAssistant: "
    found, _ = to_pair({"chosen": shared + "Pear.", "rejected": shared + "Go away."})
    turns = (Message("user", "Pick a fruit"), Message("assistant", "Sure."), Message("user", "Which?"))
    assert found == Pair(turns, "Pear.", "Go away.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen: is null, not text or messages"),
        ({"prompt": "q", "chosen": "a"}, "rejected: is missing"),
        ({"prompt": "q", "chosen": "a", "rejected": "  "}, "rejected: is empty"),
        ({"prompt": "q", "chosen": "Blue.", "rejected": "Blue."}, "rejected: is the same as chosen"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt: has an empty user turn"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt: is a number, not a list of messages"),
        ({"chosen": "a", "rejected": "b"}, "prompt: is missing, and chosen is no"),
        ([1, 2], "row: is a list, not an object"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: x\n\nHuman: r\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: y\n\nHuman: r\n\nAssistant: b"},
            "rejected: differs from chosen before the last answer",
        ),
        ({"prompt": [{"role": "tool", "content": "q"}], "chosen": "a", "rejected": "b"}, "prompt: has a turn with role 'tool'"),
    ],
    ids=["null", "missing", "blank", "equal", "empty prompt", "number", "no prompt", "list", "transcripts part early", "role"],
)  # fmt: skip
def test_bad_row_says_field_and_reason(row: object, message: str) -> None:
    """Reports hiyouga/LLaMA-Factory#3364 and #3555, pytorch/rl#3520."""
    with pytest.raises(BadRow) as error:
        to_pair(row)
    assert str(error.value).startswith(message)


# --- files ---


def test_rejects_are_named_by_file_and_line(tmp_path: Path) -> None:
    lines = [
        '{"prompt":"q1","chosen":"a","rejected":"b"}',
        "",
        '{"prompt":"q2","chosen":null,"rejected":"b"}',
        "{oops",
        '{"prompt":"q3"}',
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    intake = read_all(str(tmp_path))
    assert intake.pairs == [pair("q1", "a", "b")]
    assert [(reject.file, reject.line, reject.field) for reject in intake.rejects] == [
        ("rows.jsonl", 3, "chosen"),
        ("rows.jsonl", 4, "row"),
        ("rows.jsonl", 5, "chosen"),
    ]
    with pytest.raises(
        DataError, match=r"3 of 4 rows .* cannot be used \(75\.0%; most often: .*more than data\.max_bad_share 0\.5"
    ):
        report_rejects(intake, "rows", max_bad_share=0.5)
    report_rejects(intake, "rows", max_bad_share=0.75)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        read_all(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="that folder has no file ending in"):
        read_all(str(tmp_path))
    (tmp_path / "table.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match="only files ending in"):
        read_all(str(tmp_path / "table.xlsx"))


def test_a_cut_gzip_is_a_clean_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt":"q","chosen":"a","rejected":"b"}\n' * 1000)
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read to its end"):
        read_all(str(tmp_path / "rows.jsonl.gz"))


def test_pairs_survive_writing_and_reading(tmp_path: Path) -> None:
    pairs = [Pair((Message("system", "s"), Message("user", "ü\n\u2028")), "a\tb", "c")]
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs


# --- division by prompt ---


def test_parts_are_disjoint_by_normalised_prompt_and_sizes_exact() -> None:
    pairs = [pair(f"Question  {n}", "a", str(k)) for n in range(25) for k in range(2)]
    pairs += [pair(f"question {n} ", "b", "c") for n in range(25)]
    parts = split_pairs(pairs, SPLIT, None)
    keys = [{prompt_key(row.prompt) for row in parts[part]} for part in PARTS]
    assert [len(part) for part in keys] == [3, 2, 6, 6, 4, 4]
    assert len(set().union(*keys)) == 25
    assert all(len(parts[part]) == 3 * len(part_keys) for part, part_keys in zip(PARTS, keys, strict=True))


def test_parts_do_not_depend_on_row_order() -> None:
    pairs = [pair(f"Question {n}", "a", str(k)) for n in range(25) for k in range(2)]
    assert split_pairs(pairs, SPLIT, None) == split_pairs(pairs[::-1], SPLIT, None)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(DataError, match=r"has 7 different prompts.*leave 2 to train on"):
        split_pairs([pair(str(n)) for n in range(7)], SPLIT, None)


# --- prompts ---


def test_prompt_batches_are_a_function_of_seed_and_number(tokenizer: ChatTokenizer) -> None:
    questions = prompts([pair(f"q{n}") for n in range(7)], tokenizer)
    batches = list(prompt_batches(questions, 3, 4, seed=5))
    assert [[p.key for p in batch] for batch in batches[2:]] == [
        [p.key for p in batch] for batch in list(prompt_batches(questions, 3, 4, seed=5))[2:]
    ]
    assert len({p.key for batch in batches[:2] for p in batch}) == 6  # one pass, no prompt twice


# --- real data ---


def test_demo_data_is_whole() -> None:
    """Written for this project: no reject, no duplicate prompt, and length does not give the label away."""
    intake = read_all(str(ROOT / "data" / "demo"))
    assert not intake.rejects
    assert len({prompt_key(row.prompt) for row in intake.pairs}) == len(intake.pairs) >= 480
    assert 0.4 <= sum(len(row.chosen) > len(row.rejected) for row in intake.pairs) / len(intake.pairs) <= 0.6


def test_no_word_or_opening_of_the_demo_data_tells_chosen_from_rejected() -> None:
    """Of the pairs in which one answer alone has a feature, it is the chosen one in at most 65%, and the rejected one too.

    Features that part fewer than 15 pairs are left out: among so few, a share above 65% comes about by chance.
    """
    in_chosen, in_rejected = Counter(), Counter()
    for row in read_all(str(ROOT / "data" / "demo")).pairs:
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
    intake = read_all(str(HH))
    assert {reject.line: reject.kind for reject in intake.rejects} == expected
    assert (intake.rows, len(intake.pairs), intake.shapes) == (1800, 1794, {"HH transcripts": 1794})
    longest = max(raw, key=lambda row: row["chosen"].count("\n\nAssistant:"))
    turns = longest["chosen"].count("\n\nAssistant:") + longest["chosen"].count("\n\nHuman:")
    assert max(len(pair.prompt) for pair in intake.pairs) == turns - 1 == 35


@needs_shared
def test_dpo_en_demo_is_read_whole() -> None:
    intake = read_all(str(DPO_EN))
    assert (intake.rows, len(intake.rejects), intake.shapes) == (300, 0, {"ShareGPT pairs": 300})
