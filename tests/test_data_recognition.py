"""Which shape a file has; what a source wants of it; and which files are refused."""

from pathlib import Path
from typing import Any

import pytest
from taking import assistant, chat, demonstration, pair, prompt_only, sharegpt, take, user, write_rows

from pipeline.data.records import PromptOnly
from pipeline.data.shapes import SHAPES
from pipeline.errors import DataError

QA = demonstration("q", "a")
GOOD = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b"} for number in range(3)]


# --- a kind is wanted ---


def test_of_pairs_the_chosen_answers_and_the_prompts_are_taken(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"})
    assert take(file, "demonstrations")[0] == [QA]
    assert take(file, "prompts")[0] == [prompt_only("q")]


def test_every_answer_of_a_conversation_gives_a_prompt(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"messages": chat("q", "a", "r")})
    assert take(file, "prompts")[0] == [prompt_only("q"), PromptOnly((user("q"), assistant("a"), user("r")))]
    records, tally = take(file, "demonstrations")
    assert (records, tally.left_out) == ([QA], 1)


def test_a_source_that_has_too_little_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "q", "reply": "a", "verdict": "b"})
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl is for data\.pairs but holds prompts without answers \(not read: reply, verdict\): "
        r"it has no rejected answers to compare with",
    ):
        take(file, "pairs")
    with pytest.raises(DataError, match="it has no answers to learn from"):
        take(file, "demonstrations")


# --- files that are refused ---

TOOL_CALL = {"from": "function_call", "value": '{"name": "f"}'}
LABEL = "two answers and a label that says which is better.*write the better one as chosen"
REFUSED = {
    "tool turns": ({"conversations": [*sharegpt("q"), TOOL_CALL]}, "tool calls .* keep the rows without tools"),
    "tools offered": ({"messages": chat("q", "a"), "tools": '[{"name": "f"}]'}, "tool calls"),
    "OpenAI tool calls": (
        {"messages": [*chat("q"), {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "tool calls",
    ),
    "KTO": ({"prompt": "q", "completion": "a", "label": True}, r"good or bad \(KTO\).*join good and bad answers"),
    "KTO chat": ({"messages": chat("q", "a"), "label": False}, "KTO"),
    "pictures": ({"messages": chat("q", "a"), "images": ["1.png"]}, "about images, videos or sounds"),
    "text": ({"text": "### Human: q ### Assistant: a"}, "text alone.*split each text into prompt and completion"),
    "token ids": ({"input_ids": [1, 2], "labels": [1, 2]}, "token ids.*bring the text"),
    "ranked": ({"prompt": "Greet me", "outputs": ["Hello!", "meh", "bye"]}, "ranked answers.*set data.expand_rankings: true"),
    "not known": ({"提问": "a", "回答": "b"}, "shape that is not known: its rows have the fields 提问, 回答"),
    "two answers and a label, no prompt": ({"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 0}, LABEL),
    "two answers and a label": ({"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 0}, LABEL),
    "two conversations and a label": ({"conversation_a": chat("q", "a"), "conversation_b": chat("q", "b"), "winner": "model_a"}, LABEL),
    "two answers and a label, and text": ({"text": "q", "completion_a": "a", "completion_b": "b", "overall_pref": "A"}, LABEL),
    "rated answers": ({"prompt": "q", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]}, "list of rated answers.*the best first, as responses"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_file_says_what_it_is_and_what_to_do(name: str, tmp_path: Path) -> None:
    """Report hiyouga/LLaMA-Factory#3364, for ranked answers: none is ignored without a word."""
    row, words = REFUSED[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl .*{words}"):
        take(write_rows(tmp_path / "rows.jsonl", row))


def test_ranked_answers_are_expanded_where_that_is_asked_for(tmp_path: Path) -> None:
    """Report hiyouga/LLaMA-Factory#3364: an empty answer is a reject, a third answer is used."""
    file = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "Greet me", "outputs": ["Hello!", ""]},
        {"prompt": "Greet me", "outputs": ["Hello!", "meh", "bye"]},
    )
    records, tally = take(file, expand_rankings=True)
    assert records == [pair("Greet me", *two) for two in (("Hello!", "meh"), ("Hello!", "bye"), ("meh", "bye"))]
    assert [(bad.line, bad.kind) for bad in tally.shown] == [(1, "outputs[1] is empty")]


@pytest.mark.parametrize(
    ("row", "readings", "named"),
    [
        (
            {"prompt": "q", "completion": "a", "messages": chat("r", "b")},
            ("chat messages", "prompt with completion"),
            ("messages", "prompt-completion"),
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "c"},
            ("prompt with chosen and rejected", "prompt with completion"),
            ("prompt-pairs", "prompt-completion"),
        ),
    ],
)
def test_ambiguous_file_is_an_error_until_it_is_named(
    row: dict[str, Any], readings: tuple[str, str], named: tuple[str, str], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=rf"is ambiguous.*{readings[0]} .* and {readings[1]}"):
        take(file)
    for name in named:
        assert take(file, shape=name)[1].shapes == {SHAPES[name].title: 1}


def test_two_shapes_in_equal_number_are_ambiguous_and_otherwise_the_fewer_are_rejects(tmp_path: Path) -> None:
    alpaca = {"instruction": "q", "input": "", "output": "a"}
    with pytest.raises(DataError, match="is ambiguous"):
        take(write_rows(tmp_path / "rows.jsonl", alpaca, {"messages": chat("q", "a")}))
    _, tally = take(write_rows(tmp_path / "rows.jsonl", alpaca, alpaca, {"messages": chat("q", "a")}))
    assert tally.rejects == {"row is of another shape (chat messages) than its file (Alpaca instructions)": 1}


def test_a_wrong_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read as alpaca: its rows have the fields prompt, chosen, rejected"):
        take(write_rows(tmp_path / "rows.jsonl", *GOOD), shape="alpaca")
