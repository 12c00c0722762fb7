"""Rows and files that once were misread, or lost in part, without a word."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from taking import assistant, chat, demonstration, pair, system, take, user, write_rows

from pipeline.data.records import Demonstration, Pair, Record
from pipeline.errors import DataError

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
    "context of a question": ({"question": "q", "context": "c", "answer": "a"}, [demonstration("q\n\nc", "a")]),
    "history of pairs": (
        {"query": "q", "response": "a", "history": [["x", "y"]], "system": "s"},
        [Demonstration((system("s"), user("x"), assistant("y"), user("q")), "a")],
    ),
    "history of messages": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "history": chat("x", "y")},
        [Pair((user("x"), assistant("y"), user("q")), "a", "b")],
    ),
    "rejected answer beside messages": (
        {"messages": chat("q", "a"), "rejected_response": "b"},
        [pair("q", "a", "b")],
    ),
    "rejected messages beside messages": (
        {"system": "s", "messages": chat("q", "a"), "rejected_messages": chat("q", "b")},
        [Pair((system("s"), user("q")), "a", "b")],
    ),
    "input without an instruction": ({"instruction": " ", "input": "i", "output": "a"}, [demonstration("i", "a")]),
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
    "turns without roles": (
        {"conversation": [{"input": "q", "output": "a"}]},
        "conversation has a turn without role or from; it has 'input', 'output'",
    ),
    "history of texts": (
        {"prompt": "q", "completion": "a", "history": ["x", "y"]},
        "history has an entry that is neither [question, answer] nor a message",
    ),
    "rejected answer beside a question alone": (
        {"messages": chat("q"), "rejected_response": "b"},
        "messages does not end with an assistant's turn",
    ),
    "zero-width answer": ({"prompt": "q", "completion": "\u200b\ufeff"}, "completion is empty"),
}

RANKINGS: dict[str, tuple[dict[str, Any], str]] = {
    "two lists": ({"outputs": ["a", "b"], "responses": ["c", "d"]}, "responses is there beside outputs; leave one of them out"),
    "scores that rise": (
        {"responses": ["bad", "good"], "scores": [1, 9]},
        "responses is not in the order of its scores; the best answer must come first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RANKINGS)
def test_ranked_answers_of_which_the_order_is_in_doubt_are_rejected(name: str, tmp_path: Path) -> None:
    row, reason = RANKINGS[name]
    _, tally = take(write_rows(tmp_path / "rows.jsonl", {"prompt": "q", **row}), expand_rankings=True)
    assert tally.rejects == {reason: 1}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_read_rightly_is_rejected(name: str, tmp_path: Path) -> None:
    row, reason = REJECTED[name]
    assert take(write_rows(tmp_path / "rows.jsonl", row))[1].rejects == {reason: 1}


def test_an_answer_may_be_a_list_in_json(tmp_path: Path) -> None:
    row = {"prompt": "Three primes as JSON", "completion": '["2", "3", "5"]'}
    assert len(take(write_rows(tmp_path / "rows.jsonl", row))[0]) == 1


# --- rows that say more than their file ---


@pytest.mark.parametrize(
    ("few", "many", "titles"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q"}, ("prompt with chosen and rejected", "prompts without answers")),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q"}, ("prompt with completion", "prompts without answers")),
        (
            {"prompt": "q", "response": "a", "chosen": "a", "rejected": "b"},
            {"prompt": "q", "response": "a"},
            ("prompt with chosen and rejected", "prompt with response"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("counts", [(100, 20), (60, 40)], ids=["after the sample", "in the sample"])
def test_rows_of_a_richer_shape_than_their_file_are_rejects(
    few: dict, many: dict, titles: tuple[str, str], counts: tuple[int, int], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", *[many] * counts[0], *[few] * counts[1])
    records, tally = take(file)
    assert len(records) == counts[0]
    assert tally.rejects == {f"row is of another shape ({titles[0]}) than its file ({titles[1]})": counts[1]}


# --- answers and labels under other names ---

LABELLED: list[dict[str, Any]] = [
    {"prompt": "q", "completion": "bad", "label": 0},
    {"prompt": "q", "completion": "bad", "label": "False"},
    {"messages": chat("q", "bad"), "kto_tag": False},
    {"question": "q", "answer": "bad", "label": False},
    {"instruction": "q", "output": "bad", "label": "bad"},
]


@pytest.mark.parametrize("row", LABELLED)
def test_answers_with_a_label_are_refused_however_the_label_is_written(row: dict, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"good or bad \(KTO\)"):
        take(write_rows(tmp_path / "rows.jsonl", row))


UNKNOWN_NAMES: list[dict[str, Any]] = [
    {"prompt": "q", "answers": [{"answer": "a", "rank": 1.0}]},
    {"instruction": "q", "completions": [{"response": "a"}]},
    {"prompt": "q", "output": "a"},
    {"instruction": "q", "generation": "a"},
    {"prompt": "q", "chosen ": "a", "rejected ": "b"},
    {"prompt": "q", "preferred": "a", "dispreferred": "b"},
    {"prompt": "q", "pos_resp": "a", "neg_resp": "b"},
]


@pytest.mark.parametrize("row", UNKNOWN_NAMES)
def test_fields_that_may_be_answers_stop_a_check_unless_the_shape_is_named(row: dict, tmp_path: Path) -> None:
    fields = sorted(row.keys() - {"prompt", "question", "instruction"})
    file = write_rows(tmp_path / "rows.jsonl", row)
    with pytest.raises(
        DataError, match=f"beside them {', '.join(fields)}, which may be answers .* rename them"
    ) as stop:
        take(file)
    name = str(stop.value).removesuffix(".").rpartition(" ")[2]
    assert len(take(file, shape=name)[0]) == len(take(file, "prompts")[0]) == 1


def test_numbers_are_no_answers(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "num_responses": 7, "answers": []})
    assert len(take(rows)[0]) == 1


def test_tools_of_an_openai_pair_are_refused(tmp_path: Path) -> None:
    given = {"messages": chat("q"), "tools": [{"type": "function"}]}
    row = {"input": given, "preferred_output": [A], "non_preferred_output": [{**A, "content": "b"}]}
    with pytest.raises(DataError, match="tool calls"):
        take(write_rows(tmp_path / "rows.jsonl", row))


# --- fields that are there twice, and values that are none ---


def test_a_field_that_is_named_twice_is_not_read(tmp_path: Path) -> None:
    twice = '{"prompt": "q", "chosen": "a", "rejected": "b", "chosen": "c"}'
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n' + twice + "\n")
    assert take(tmp_path / "rows.jsonl")[1].rejects == {"row names the field 'chosen' twice": 1}
    (tmp_path / "rows.json").write_text(f"[{twice}]")
    with pytest.raises(DataError, match="item 1 names the field 'chosen' twice"):
        take(tmp_path / "rows.json")
    pq.write_table(pa.Table.from_arrays([pa.array(["q"])] * 2, names=["prompt", "prompt"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="it names a field twice"):
        take(tmp_path / "rows.parquet")


def test_nothing_written_as_a_word_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a", "tools": NaN, "system": NaN}\n')
    assert take(tmp_path / "rows.jsonl")[0] == [demonstration("q", "a")]
    (tmp_path / "rows.csv").write_text("prompt, chosen,rejected\nq,a,NaN\nq,a,NULL\nq,a,b\n")
    records, tally = take(tmp_path / "rows.csv")
    assert (records, tally.rejects) == ([pair("q", "a", "b")], {"rejected is null, not text or messages": 2})


def test_a_time_that_no_calendar_has_is_a_clean_error(tmp_path: Path) -> None:
    columns = {"prompt": ["q"], "completion": ["a"], "t": pa.array([2**62], pa.timestamp("us"))}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read to its end"):
        take(tmp_path / "rows.parquet")


# --- what is said of a file ---


def test_what_is_not_read_is_named_wherever_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"messages": chat("q", "a")}
    thinking = {"messages": [*chat("q"), {**A, "reasoning_content": "r", "thinking": None}], "late": 1}
    take(write_rows(tmp_path / "rows.jsonl", *[plain] * 150, thinking))
    assert "fields not read: late, messages[].reasoning_content\n" in capsys.readouterr().out


def test_answers_that_begin_with_their_prompt_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "What is 2+2?", "chosen": "What is 2+2?\nFour.", "rejected": "What is 2+2?\nFive."}
    take(write_rows(tmp_path / "rows.jsonl", row))
    assert "WARNING: its answers begin with their prompt's own text" in capsys.readouterr().out
