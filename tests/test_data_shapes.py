"""Rows of the shapes that people have -> records, or the reason why not."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import ROOT
from taking import assistant, chat, demonstration, pair, prompt_only, sharegpt, system, take, user, write_rows

from pipeline.data.records import Demonstration, Pair, Record
from pipeline.data.shapes import SHAPES
from pipeline.params.data import DataParams


def typed(role: str, *texts: str, weight: float | None = None) -> dict[str, Any]:
    """A message of typed parts."""
    turn = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
    return turn if weight is None else {**turn, "loss_weight": weight}


A, B = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
QAB = pair("q", "a", "b")
QA = demonstration("q", "a")
HH_A, HH_B = "\n\nHuman: q\n\nAssistant: a", "\n\nHuman: q\n\nAssistant: b"

CASES: dict[str, tuple[dict[str, Any], str, list[Record]]] = {
    # pairs
    "text": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt-pairs", [QAB]),
    "messages apart": ({"prompt": chat("q"), "chosen": [A], "rejected": [B]}, "prompt-pairs", [QAB]),
    "messages inside": ({"chosen": chat("q", "a"), "rejected": chat("q", "b")}, "conversation-pairs", [QAB]),
    "UltraFeedback": (
        {
            "prompt": "q",
            "prompt_id": "5e",
            "chosen": chat("q", "a"),
            "rejected": chat("q", "b"),
            "messages": chat("q", "a"),
            "score_chosen": 8.5,
            "score_rejected": 3.0,
        },
        "prompt-pairs",
        [QAB],
    ),
    "ShareGPT prompt": ({"prompt": sharegpt("q"), "chosen": "a", "rejected": "b"}, "prompt-pairs", [QAB]),
    "ShareGPT pairs": (
        {"conversations": sharegpt("q"), "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
        "sharegpt-pairs",
        [QAB],
    ),
    "HH": ({"chosen": HH_A, "rejected": HH_B}, "hh-transcripts", [QAB]),
    "HH prompt apart": ({"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": "a", "rejected": "b"}, "prompt-pairs", [QAB]),
    "question and system": (
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        "question-pairs",
        [Pair((system("s"), user("q")), "a", "b")],
    ),
    "instruction and input": (
        {"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"},
        "instruction-pairs",
        [pair("q\n\ni", "a", "b")],
    ),
    "typed parts": (
        {
            "chosen_messages": [typed("system", "s"), typed("user", "q"), typed("assistant", "a", "a", weight=1.0)],
            "rejected_messages": [typed("system", "s"), typed("user", "q"), typed("assistant", "b", weight=1.0)],
        },
        "chosen-messages",
        [Pair((system("s"), user("q")), "aa", "b")],
    ),
    "OpenAI pairs": (
        {"input": {"messages": chat("q")}, "preferred_output": [A], "non_preferred_output": [B]},
        "openai-pairs",
        [QAB],
    ),
    # demonstrations
    "chat": (
        {"messages": [{"role": "system", "content": "s"}, *chat("q", "a", "r", "b")]},
        "messages",
        [
            Demonstration((system("s"), user("q")), "a"),
            Demonstration((system("s"), user("q"), assistant("a"), user("r")), "b"),
        ],
    ),
    "chat beside its prompt": ({"prompt": "q", "prompt_id": "5e", "messages": chat("q", "a")}, "messages", [QA]),
    "loss weights": (
        {"messages": [typed("user", "q", weight=0.0), typed("assistant", "a", weight=0.0), typed("user", "r"), typed("assistant", "b", weight=1.0)]},
        "messages",
        [Demonstration((user("q"), assistant("a"), user("r")), "b")],
    ),
    "OpenAI weight": ({"messages": [*chat("q"), {**A, "weight": 1}]}, "messages", [QA]),
    "chat that waits": ({"messages": chat("q")}, "messages", [prompt_only("q")]),
    "ShareGPT": ({"conversations": sharegpt("q", "a"), "system": "s"}, "sharegpt", [Demonstration((system("s"), user("q")), "a")]),
    "Alpaca": ({"instruction": "q", "input": "i", "output": "a"}, "alpaca", [demonstration("q\n\ni", "a")]),
    "Alpaca without input": ({"instruction": "q", "input": "", "output": "a", "text": "q a"}, "alpaca", [QA]),
    "Alpaca with history": (
        {"instruction": "r", "input": None, "output": "b", "history": [["q", "a"]]},
        "alpaca",
        [Demonstration((user("q"), assistant("a"), user("r")), "b")],
    ),
    "Dolly": ({"instruction": "q", "context": "c", "response": "a", "category": "qa"}, "dolly", [demonstration("q\n\nc", "a")]),
    "seed tasks": (
        {"instruction": "q", "instances": [{"input": "", "output": "a"}, {"input": "i", "output": "b"}]},
        "seed-tasks",
        [QA, demonstration("q\n\ni", "b")],
    ),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, "prompt-completion", [QA]),
    "prompt and response": ({"prompt": chat("q"), "response": [A]}, "prompt-response", [QA]),
    "question and answer": ({"question": "q", "answer": "a"}, "question-answer", [QA]),
    # prompts
    "prompt alone": ({"prompt": "q", "id": 3}, "prompt-alone", [prompt_only("q")]),
    "instruction alone": ({"instruction": "q", "input": "i"}, "instruction-alone", [prompt_only("q\n\ni")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_shape_is_recognised_and_read(name: str, tmp_path: Path) -> None:
    row, shape, records = CASES[name]
    found, tally = take(write_rows(tmp_path / "rows.jsonl", row))
    assert (found, tally.shapes, tally.rejects) == (records, {SHAPES[shape].title: 1}, {})


@pytest.mark.parametrize("name", CASES)
def test_named_shape_reads_the_same(name: str, tmp_path: Path) -> None:
    row, shape, records = CASES[name]
    assert take(write_rows(tmp_path / "rows.jsonl", row), shape=shape)[0] == records


def test_parameter_takes_the_names_of_all_shapes() -> None:
    assert get_args(DataParams.model_fields["shape"].annotation) == ("auto", *SHAPES)


def test_every_shape_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "data_shapes.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in SHAPES)


def test_what_is_printed_names_shape_rows_and_unread_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b", "score": 1} for number in range(1234)]
    take(write_rows(tmp_path / "rows.jsonl", *rows, {"prompt": "q"}))
    assert capsys.readouterr().out == (
        "rows.jsonl: prompt with chosen and rejected, 1,235 rows; 1 of them rejected; fields not read: score\n"
    )


def test_transcripts_are_split_at_their_last_shared_turn(tmp_path: Path) -> None:
    """Report huggingface/trl#1858: not at the first assistant's turn."""
    shared = "\n\nHuman: Pick a fruit\n\nAssistant: Sure.\n\nHuman: Which?\n\nAssistant: "
    row = {"chosen": shared + "Pear.", "rejected": shared + "Go away."}
    turns = (user("Pick a fruit"), assistant("Sure."), user("Which?"))
    assert take(write_rows(tmp_path / "rows.jsonl", row))[0] == [Pair(turns, "Pear.", "Go away.")]


GOOD = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b"} for number in range(3)]
BAD_PAIRS: dict[str, tuple[Any, str, str, str]] = {
    "null": ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen", "null", "is null, not text or messages"),
    "missing": ({"prompt": "q", "chosen": "a"}, "rejected", "missing", "is missing"),
    "blank": ({"prompt": "q", "chosen": "a", "rejected": " \t"}, "rejected", "text", "is empty"),
    "equal": ({"prompt": "Name a colour", "chosen": "Blue.", "rejected": "Blue."}, "rejected", "text", "is the same as chosen"),
    "empty prompt": ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt", "text", "has an empty user turn"),
    "number": ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt", "a number", "is a number, not text or a list of messages"),
    "number as answer": ({"prompt": "q", "chosen": 4, "rejected": "b"}, "chosen", "a number", "is a number, not text or messages"),
    "list": ([1, 2], "row", "a list", "is a list, not an object"),
    "role": ({"prompt": [{"role": "narrator", "content": "q"}], "chosen": "a", "rejected": "b"}, "prompt", "text", "has a turn with role 'narrator'"),
    "tool turn": ({"prompt": [*chat("q"), {"role": "tool", "content": "4"}], "chosen": "a", "rejected": "b"}, "row", "an object", "holds conversations with tool calls (tools that are offered, or turns like function_call and observation), which are not read"),
    "picture": ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "chosen": "a", "rejected": "b"}, "prompt", "an object", "has a part of content of type 'image_url'; only text is read"),
    "prompt not in conversation": ({"prompt": "other", "chosen": chat("q", "a"), "rejected": chat("q", "b")}, "chosen", "a list", "is a conversation in which the prompt does not occur"),
    "answer by the user": ({"prompt": "q", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"}, "chosen", "a list", "is a conversation in which the prompt does not occur"),
    "ends with the assistant": ({"prompt": chat("q", "a"), "chosen": "a", "rejected": "b"}, "prompt", "a list", "does not end with a user's turn"),
    "late system turn": ({"prompt": [*chat("q", "a"), {"role": "system", "content": "s"}, *chat("r")], "chosen": "a", "rejected": "b"}, "prompt", "a list", "has a system turn that is not the first"),
    "two systems": ({"system": "s", "prompt": [{"role": "system", "content": "t"}, *chat("q")], "chosen": "a", "rejected": "b"}, "system", "text", "is there beside another system turn; leave one of them out"),
    "half a surrogate": ({"prompt": "q", "chosen": "a\ud83d", "rejected": "b"}, "chosen", "text", "holds bytes that are not UTF-8, or one half of an escaped pair of surrogates"),
    "other shape": ({"instruction": "q", "input": "", "output": "a"}, "row", "an object", "is of another shape (Alpaca instructions) than its file (prompt with chosen and rejected)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_row_says_line_field_type_and_reason(name: str, tmp_path: Path) -> None:
    """Reports hiyouga/LLaMA-Factory#3364 and #3555, pytorch/rl#3520."""
    row, *expected = BAD_PAIRS[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (*GOOD, row)), encoding="utf-8")
    records, tally = take(file)
    assert len(records) == 3
    assert [(bad.file, bad.line, bad.field, bad.type, bad.reason) for bad in tally.shown] == [
        ("rows.jsonl", 4, *expected)
    ]


BAD_OTHERS = {
    "transcripts part early": (
        [{"chosen": HH_A.replace("q", "x") + "\n\nHuman: r\n\nAssistant: a", "rejected": HH_A + "\n\nHuman: r\n\nAssistant: b"}],
        "rejected differs from chosen before the last answer",
    ),
    "transcript ends with the human": ([{"chosen": HH_A + "\n\nHuman: bye", "rejected": HH_B}], "chosen does not end with an assistant's turn"),
    "no transcript": ([{"chosen": "a", "rejected": "b"}], r"prompt is missing, and chosen is no '\n\nHuman: … \n\nAssistant: …' transcript"),
    "greeting": ([{"messages": [A, *chat("q", "a")]}], "messages has an assistant's turn that does not follow a user's"),
    "content null": ([{"messages": [*chat("q"), {"role": "assistant", "content": None}]}], "messages has a turn whose content is null, not text"),
    "half a loss weight": ([{"messages": [*chat("q"), {**A, "loss_weight": 0.5}]}], "messages has a turn with loss weight 0.5; 0 and 1 are known"),
    "user's turn trained on": ([{"messages": [{"role": "user", "content": "q", "loss_weight": 1}, A]}], "messages has a user turn with loss weight 1; only answers are trained on"),
    "no instances": ([{"instruction": "q", "instances": []}], "instances is a list, not a list with at least one entry"),
    "answer a number": ([{"question": "2+2?", "answer": 4}], "answer is a number, not text or messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OTHERS)
def test_bad_rows_of_other_shapes(name: str, tmp_path: Path) -> None:
    rows, reason = BAD_OTHERS[name]
    assert take(write_rows(tmp_path / "rows.jsonl", *rows))[1].rejects == {reason: 1}


def test_answers_without_weight_are_left_out_and_counted(tmp_path: Path) -> None:
    row = {"messages": [*chat("q"), {**A, "loss_weight": 0}, *chat("r"), {**B, "loss_weight": 1}]}
    records, tally = take(write_rows(tmp_path / "rows.jsonl", row), "demonstrations")
    assert records == [Demonstration((user("q"), assistant("a"), user("r")), "b")]
    assert tally.left_out == 1
