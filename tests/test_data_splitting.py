"""Dividing records by prompt, and the files between prepare and the stages."""

import random
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from taking import assistant, demonstration, pair, prompt_only, system, user

from pipeline.data.parts import for_part
from pipeline.data.pool import Pool
from pipeline.data.prepared import read_demonstrations, read_pairs, read_prompts, write_records
from pipeline.data.records import Demonstration, Pair, PromptOnly, Record, group_key, prompt_key
from pipeline.data.splitting import PARTS, Division, divide
from pipeline.errors import DataError
from pipeline.params.data import SplitParams

SPLIT = SplitParams(heldout=3, development=2, sft=0.3, reward=0.3, judge=0.2, ppo=0.2)
FROM_PAIRS = dict.fromkeys(PARTS, "pairs")
APART = FROM_PAIRS | {"sft": "demonstrations", "ppo": "prompts"}


def divided(
    rows: Sequence[Record | tuple[Record, ...]], sources: dict[str, str] = FROM_PAIRS, max_prompts: int | None = None
) -> tuple[dict[str, list[Record]], Division]:
    """The records of each part. A row is a record, or the records of one conversation."""
    pool = Pool(BytesIO())
    for row in rows:
        pool.add(row if isinstance(row, tuple) else (row,))
    division = divide(pool.index(), sources, SPLIT, max_prompts)
    return {part: list(pool.read(numbers_N)) for part, numbers_N in division.parts.items()}, division


def pairs(count: int, each: int = 1) -> list[Pair]:
    return [pair(f"Question {number}", "a", str(answer)) for number in range(count) for answer in range(each)]


def keys(records: list[Record]) -> set[str]:
    return {group_key(record.prompt) for record in records}


def test_parts_are_disjoint_by_normalised_prompt_and_sizes_exact() -> None:
    """Report OpenRLHF/OpenRLHF#1089: what measures is never among what trains, nor written differently among it."""
    rows = [pair(f"Question  {number}", "a", str(answer)) for number in range(25) for answer in range(2)]
    rows += [pair(f"question {number} ", "b", "c") for number in range(25)]
    parts, division = divided(rows)
    found = [keys(parts[part]) for part in PARTS]
    assert [len(part) for part in found] == [3, 2, 6, 6, 4, 4]
    assert len(set().union(*found)) == 25
    assert all(len(parts[part]) == 3 * len(part_keys) for part, part_keys in zip(PARTS, found, strict=True))
    assert division.prompts_in_two_parts == 0


def test_neither_the_order_of_rows_nor_of_files_matters() -> None:
    rows: list[Record | tuple[Record, ...]] = [*pairs(25, each=2), *(demonstration(f"Demo {n}") for n in range(9))]
    rows += [prompt_only(f"Prompt {number}") for number in range(9)]
    rows += [
        (demonstration(f"Chat {n}"), demonstration(f"Chat {n} again"), pair(f"Chat {n} at last")) for n in range(4)
    ]
    expected = divided(rows, APART)[0]
    for seed in range(3):
        assert divided(random.Random(seed).sample(rows, len(rows)), APART)[0] == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("What is Tea?", " what  is\ntea? "),
        ("WEISS ODER GRÜN", "weiß oder grün"),
        ("第１個？", "第1個?"),  # full-width digits and marks
        ("ﬁne", "fine"),  # a ligature
        ("e\u0301tude", "étude"),  # an accent of its own
    ],
)
def test_prompts_that_are_only_written_differently_are_one_group(first: str, second: str) -> None:
    assert group_key((user(first),)) == group_key((user(second),))
    parts, _ = divided([*pairs(25), pair(first), pair(second)])
    assert sorted(len(records) - len(keys(records)) for records in parts.values()) == [0, 0, 0, 0, 0, 1]


def test_prompts_that_differ_in_a_word_or_a_role_are_not() -> None:
    turns = [(user("a"),), (user("b"),), (system("a"),), (user("a"), assistant("b"), user("c")), (user("a b c"),)]
    assert len({group_key(prompt) for prompt in turns}) == len({prompt_key(prompt) for prompt in turns}) == len(turns)


@pytest.mark.parametrize("number", range(25))
def test_a_conversation_goes_where_its_first_question_goes(number: int) -> None:
    """Chats that share a turn with one another and with a pair are one group, whichever part that pair is in."""
    first, second = (user(f"Question {number}"),), (user(f"Question {number}"), assistant("yes"), user("More?"))
    chat = (Demonstration(first, "yes"), Demonstration(second, "no"))
    linked = (Demonstration(second, "maybe"), demonstration("Quite another"))
    others = [demonstration(f"Demo {n}") for n in range(4)]
    parts, _ = divided([*pairs(25), chat, linked, *others], FROM_PAIRS | {"sft": "demonstrations"})
    group = {*chat, *linked, pair(f"Question {number}", "a", "0")}
    found = [group & set(parts[part]) for part in PARTS]
    assert sum(map(bool, found)) == 1
    used = {*chat, *linked} if group & set(parts["sft"]) else {pair(f"Question {number}", "a", "0")}
    assert set().union(*found) == used


def test_sources_apart_serve_the_parts_that_they_can() -> None:
    """25 prompts with pairs: 3 and 2 are measured on, 20 go to reward and judge as 3 to 2. The others have one use each."""
    rows = [
        *pairs(25),
        *(demonstration(f"Demo {n}") for n in range(7)),
        *(prompt_only(f"Prompt {n}") for n in range(9)),
    ]
    parts, division = divided(rows, APART)
    assert {part: len(records) for part, records in parts.items()} == {
        "heldout": 3,
        "development": 2,
        "sft": 7,
        "reward": 12,
        "judge": 8,
        "ppo": 9,
    }
    assert {type(record) for record in parts["sft"]} == {Demonstration}
    assert {type(record) for record in parts["ppo"]} == {PromptOnly}
    assert division.left_out == {}


def test_demonstrations_and_prompts_that_are_held_out_are_left_out_and_counted() -> None:
    """Every prompt has all three records, so each of the 20 groups that are left serves one part with one of them."""
    rows: list[Record] = [*pairs(25)]
    rows += [demonstration(f"question {n}") for n in range(25)] + [prompt_only(f"QUESTION {n}") for n in range(25)]
    parts, division = divided(rows, APART)
    assert [len(parts[part]) for part in PARTS] == [3, 2, 6, 6, 4, 4]
    assert division.left_out == {
        "pairs_prompt_in_another_part": 6 + 4,
        "demonstrations_held_out": 5,
        "demonstrations_prompt_in_another_part": 6 + 4 + 4,
        "prompts_held_out": 5,
        "prompts_prompt_in_another_part": 6 + 6 + 4,
    }


def test_repeated_records_are_counted_and_used_once() -> None:
    parts, division = divided([*pairs(25), *pairs(25), pair("Question 3", "b", "a")])
    assert division.duplicates == 25
    assert sum(map(len, parts.values())) == 26


def test_max_prompts_keeps_those_of_smallest_hash() -> None:
    parts, division = divided(pairs(30, each=2), max_prompts=25)
    smallest = sorted(prompt_key(record.prompt) for record in pairs(30))[:25]
    assert {prompt_key(record.prompt) for records in parts.values() for record in records} == set(smallest)
    assert division.left_out == {"pairs_beyond_max_prompts": 10}


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(DataError, match=r"has 7 different prompts.*leave 2 to train on"):
        divided(pairs(7))
    with pytest.raises(DataError, match=r"has 3 different prompts with pairs.*leave 0 to train on"):
        divided([*pairs(3), *(demonstration(f"Demo {n}") for n in range(50))], APART)
    with pytest.raises(DataError, match="too few to give the part sft any"):
        divided([*pairs(25), prompt_only("q")], APART)


def test_parts_are_what_their_stages_read(tmp_path: Path) -> None:
    """A chosen answer of two pairs is one demonstration, and a prompt of two pairs is one prompt."""
    rows = [pair("q", "a", "b"), pair("q", "a", "c"), pair("Q", "d", "e"), pair("r", "a", "b")]
    for part in PARTS:
        write_records(tmp_path / part, for_part(part, rows))
    assert read_pairs(tmp_path / "reward") == read_pairs(tmp_path / "heldout") == rows
    assert read_demonstrations(tmp_path / "sft") == [
        demonstration("q", "a"),
        demonstration("Q", "d"),
        demonstration("r", "a"),
    ]
    assert read_prompts(tmp_path / "ppo") == [prompt_only("q"), prompt_only("r")]


def test_records_survive_writing_and_reading(tmp_path: Path) -> None:
    prompt = (system("s"), user("ü\n\u2028"))
    write_records(tmp_path / "rows", [Pair(prompt, "a\tb", "c"), Demonstration(prompt, "\r\n"), PromptOnly(prompt)])
    assert read_pairs(tmp_path / "rows") == [Pair(prompt, "a\tb", "c")]
    assert read_demonstrations(tmp_path / "rows") == [Demonstration(prompt, "\r\n")]
    assert read_prompts(tmp_path / "rows") == [PromptOnly(prompt)]
