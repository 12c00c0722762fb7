"""The figures of the data and the report that a person reads."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import taking
from chat_styles import STYLES

from pipeline.data.enough import refuse_without_pairs
from pipeline.data.figures import PairCounts, Sample, Survey, check_equal_after_cut, sample_of
from pipeline.data.labels import label_figures, longer
from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record
from pipeline.data.report import data_report, visible
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import DataError, TrainingError


def pair(chosen: str, rejected: str, prompt: str = "hi") -> Pair:
    return taking.pair(prompt, chosen, rejected)


def labelled(longer: int, shorter: int, equal: int = 0) -> list[Pair]:
    return [*[pair("aa", "b")] * longer, *[pair("a", "bb")] * shorter, *[pair("a", "b")] * equal]


def surveyed(rows: Iterable[Record], tokenizer: ChatTokenizer) -> Survey:
    survey = Survey(tokenizer)
    assert list(survey.of_part("sft", survey.of_raw(rows))) == list(rows)
    return survey


def report(pairs: list[Pair], tokenizer: ChatTokenizer, samples: list[Sample] = (), **source: object) -> str:
    survey = surveyed(pairs, tokenizer)
    metrics = {
        "sources": {
            "pairs": {"rows": 7, "rows_used": 6, "rejected": {}, "shapes": {"strings": 6}, "left_out": 0} | source
        },
        "duplicates": 1,
        "left_out": {},
        "prompts": {"sft": 3, "ppo": 2},
        "lines": {"sft": 4, "ppo": 2},
        "prompts_in_two_parts": 0,
        "tokens": survey.tokens.figures(),
        "labels": label_figures(survey.signs),
    }
    return data_report(metrics, list(samples), tokenizer)


# --- figures ---


def test_lengths_cuts_and_percentiles_by_hand(tokenizer: ChatTokenizer) -> None:
    """The template takes 19 tokens, so prompts of 1 to 100 letters have 20 to 119, of which 65 and more are above the limit 64.

    Answers of 1 to 100 letters have one token more, their end; 25 and more are above the limit 24.
    """
    rows = [pair("a" * n, "b", "x" * n) for n in range(100, 0, -1)]
    figures = surveyed(rows, tokenizer).tokens.figures()["lengths"]
    shared = {"count": 100, "spell_special_tokens": 0}
    assert figures == {
        "prompt": {"cut": 55, "p5": 24, "p50": 69, "p90": 109, "p99": 118, "max": 119} | shared,
        "chosen": {"cut": 77, "p5": 6, "p50": 51, "p90": 91, "p99": 100, "max": 101} | shared,
        "rejected": {"cut": 0, "p5": 2, "p50": 2, "p90": 2, "p99": 2, "max": 2} | shared,
    }


def test_pairs_that_the_cut_makes_equal_and_spelled_tokens_are_counted(tokenizer: ChatTokenizer) -> None:
    """Report OpenRLHF/OpenRLHF#1311."""
    same = pair("x" * 24 + "good", "x" * 24 + "bad")
    spelled = pair("a<|im_end|>b", "c", "<|im_start|>")
    figures = surveyed((same, spelled), tokenizer).tokens.figures()
    assert figures["pairs_equal_after_cut"] == 1
    assert {kind: row["spell_special_tokens"] for kind, row in figures["lengths"].items()} == {
        "prompt": 1,
        "chosen": 1,
        "rejected": 0,
    }


def test_too_many_pairs_that_the_cut_makes_equal_stop_the_run(tokenizer: ChatTokenizer) -> None:
    """Report OpenRLHF/OpenRLHF#1311: one of four pairs is a quarter."""
    same = pair("x" * 24 + "good", "x" * 24 + "bad")
    tokens = surveyed([same, *labelled(longer=3, shorter=0)], tokenizer).tokens
    check_equal_after_cut(tokens, 24, max_bad_share=0.25)
    with pytest.raises(
        DataError, match=r"1 of 4 pairs \(25.00%\).*tokens.max_response 24, more than data.max_bad_share 0.2;"
    ):
        check_equal_after_cut(tokens, 24, max_bad_share=0.2)


def test_stages_that_will_have_no_pairs_are_named_before_any_has_trained(tokenizer: ChatTokenizer) -> None:
    """Answers have at most 24 tokens, their end included: of three pairs one is equal after the cut, one is cut, one is whole.

    A long prompt is no reason to leave a pair out.
    """
    same, cut = pair("x" * 24 + "good", "x" * 24 + "bad"), pair("x" * 24, "b")
    survey = Survey(tokenizer)
    parts = {
        "reward": [same, cut, pair("a", "b", "x" * 100)],
        "judge": [cut],
        "development": [cut, same],
        "heldout": [cut],
    }
    for part, rows in parts.items():
        list(survey.of_part(part, rows))
    counts = survey.pairs
    assert counts["reward"] == PairCounts(pairs=3, cut=1, equal=1)
    assert [counts["reward"].left(way) for way in ("keep", "drop")] == [2, 1]
    refuse_without_pairs(counts, {"reward": "keep", "judge": "keep"}, 24)
    for dropping, part in (("reward", "development"), ("judge", "judge")):
        keeping = {"reward": "keep", "judge": "keep"} | {dropping: "drop"}
        with pytest.raises(
            TrainingError, match=f"in the part {part} none is left for {dropping}: 1 have .*{dropping}.cut_pairs: keep"
        ):
            refuse_without_pairs(counts, keeping, 24)


def test_rows_without_pairs_have_figures_too(tokenizer: ChatTokenizer) -> None:
    prompt = (Message("user", "hi"),)
    figures = surveyed([Demonstration(prompt, "yo"), PromptOnly(prompt)], tokenizer).tokens.figures()
    assert {kind: row["count"] for kind, row in figures["lengths"].items()} == {"prompt": 2, "answer": 1}
    assert figures["pairs_equal_after_cut"] == 0


def test_label_figures_by_hand() -> None:
    assert label_figures(Counter(map(longer, labelled(longer=1, shorter=5, equal=2)))) == {
        "pairs": 8,
        "chosen_longer_share": 1 / 8,
        "rejected_longer_share": 5 / 8,
        "length_alone_accuracy": 6 / 8,  # "the shorter is better": five right and two halves
    }
    assert label_figures(Counter())["pairs"] == 0


def test_samples_do_not_depend_on_the_order_of_rows(tokenizer: ChatTokenizer) -> None:
    rows = [pair("a", "b", f"q{n}") for n in range(50)]
    picked = surveyed(rows, tokenizer).picked.samples()
    assert picked == surveyed(rows[::-1], tokenizer).picked.samples()
    assert len({sample.prompt for sample in picked}) == 5


# --- the report ---


@pytest.mark.parametrize(
    ("pairs", "warned"),
    [
        (labelled(longer=130, shorter=70), True),  # 65% of 200: 4.2 standard errors above chance
        (labelled(longer=70, shorter=130), True),
        (labelled(longer=129, shorter=71), False),  # 64.5%
        (labelled(longer=13, shorter=7), False),  # 65% of 20: 1.3 standard errors
    ],
    ids=["longer", "shorter", "below the threshold", "few pairs"],
)
def test_a_label_that_length_tells_is_warned_of(pairs: list[Pair], warned: bool, tokenizer: ChatTokenizer) -> None:
    assert ("**WARNING**: length alone tells the label of 65.0%" in report(pairs, tokenizer)) == warned


def test_a_limit_that_cuts_much_is_warned_of_with_one_that_would_not(tokenizer: ChatTokenizer) -> None:
    text = report([pair("a" * 40, "b")] * 6 + [pair("a", "b")] * 94, tokenizer)
    assert (
        "tokens.max_response 24 cuts 6.0% of the chosen texts (a warning from 5% on). 41 would leave 99% whole." in text
    )
    assert "WARNING" not in report([pair("a" * 40, "b")] * 5 + [pair("a", "b")] * 95, tokenizer)


def test_counts_reasons_and_parts_are_in_tables(tokenizer: ChatTokenizer) -> None:
    text = report([pair("a", "b")], tokenizer, rejected={"chosen is empty": 1200, "a | b": 1}, rows=1234567)
    for line in (
        "| pairs | 1,234,567 | 6 | 1,201 |",
        "| pairs | chosen is empty | 1,200 |",
        r"| pairs | a \| b | 1 |",
        "| pairs | strings | 6 |",
        "Records that repeat another: 1. Answers with loss weight 0, and turns not asked for: 0.",
        "| ppo | prompts to sample answers to | 2 | 2 |",
        "| chosen | 2 | 2 | 2 | 2 | 2 | 24 | 0 (0.0%) |",
        "Each answer ends with `<|im_end|>` (2). Sampling stops at `<|im_end|>` (2).",
    ):
        assert f"{line}\n" in text


def test_samples_are_shown_as_the_model_sees_them(tokenizer: ChatTokenizer) -> None:
    """Special tokens, the border, the end token, spaces that would not be seen, and a cut answer without an end."""
    row = sample_of("reward", pair(" yes \n\tno ", "z" * 30, "hi  \nyou"))
    text = report([pair("a", "b")], tokenizer, [row])
    assert (
        "### 1. Part reward, prompt of 27 tokens\n\n"
        "chosen, 11 tokens; at the border `n|t|⏎ ▶ ·|y|e`\n\n"
        "```text\n<|im_start|>user\nhi··\nyou<|im_end|>\n<|im_start|>assistant\n▶·yes·\n⇥no·<|im_end|>■\n```\n\n"
        "rejected, 24 tokens, cut from the right; at the border `n|t|⏎ ▶ z|z|z`\n\n"
        "```text\n(the same prompt) ▶" + "z" * 24 + "\n```\n"
    ) in text


def test_a_prompt_alone_and_a_demonstration_are_shown(tokenizer: ChatTokenizer) -> None:
    prompt = (Message("user", "hi"),)
    text = report([pair("a", "b")], tokenizer, [Sample("ppo", prompt, {}), Sample("sft", prompt, {"answer": "yo"})])
    assert "<|im_start|>assistant\n▶\n```" in text
    assert "answer, 3 tokens; at the border `n|t|⏎ ▶ y|o|<|im_end|>`" in text


def test_long_prompts_are_shown_by_their_ends_and_fences_hold(tmp_path: Path) -> None:
    """500 letters and 19 tokens of the template: 119 of 519 are not shown. Three backticks in the data want four around it."""
    chat = STYLES["ChatML"].load(tmp_path, max_prompt=600)
    text = report([pair("a", "b")], chat, [Sample("sft", (Message("user", "x" * 500),), {"answer": "```py"})])
    assert "[… 119 tokens not shown …]" in text
    assert "````text\n" in text and "▶```py<|im_end|>■\n````\n" in text


def test_what_cannot_be_seen_is_named() -> None:
    assert visible("a\u00a0b\u200bc\rd") == "a⟨U+00A0⟩b⟨U+200B⟩c⟨U+000D⟩d"
    assert visible("  a b \nc") == "··a b·\nc"


def test_notes_on_the_tokenizer_are_in_the_report(tmp_path: Path) -> None:
    text = report([pair("a", "b")], STYLES["none"].load(tmp_path))
    assert "Note: The tokenizer has no chat template: a plain layout" in text
