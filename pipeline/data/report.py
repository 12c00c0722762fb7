"""reports/data.md: what was read, what was left out, and what the model will see, for a person to read.

The text is a function of its arguments: no time, path or version is in it.
"""

import re
import unicodedata
from typing import Any

from pipeline.data.figures import PERCENTILES, Sample
from pipeline.data.labels import WARNING_SHARE, length_tells
from pipeline.data.tokenization import ChatTokenizer

CUT_WARNING = 0.05  # share of cut texts from which the limit is more likely wrong than the texts
SHOWN_TOKENS = 400  # of a longer text the report shows so many, of its beginning and of its end
BORDER, END = "▶", "■"
SERVES = {
    "heldout": "final measuring, once",
    "development": "watching and tuning",
    "sft": "supervised fine-tuning",
    "reward": "reward model",
    "judge": "judge of the evaluation",
    "ppo": "prompts to sample answers to",
}
LEGEND = (
    f"Each block is the row as the model will see it, decoded from its ids. `{BORDER}` is where the answer starts: what follows "
    f"is trained on or scored, what precedes is not. `{END}` follows the end token, which is trained on too; a cut answer has none. "
    "`·` is a space that would not be seen, `⇥` a tab, `⏎` a line break, `⟨U+…⟩` another invisible character."
)


def data_report(metrics: dict[str, Any], samples: list[Sample], tokenizer: ChatTokenizer) -> str:
    """The report as Markdown.

    Args:
        metrics: of stage prepare.
        samples: rows to show.
    """
    sections = [
        "# Data report",
        *_read(metrics),
        *_parts(metrics),
        *_tokens(metrics["tokens"], tokenizer),
        *_labels(metrics["labels"]),
        *_samples(samples, tokenizer),
    ]
    return "\n\n".join(sections) + "\n"


def _read(metrics: dict[str, Any]) -> list[str]:
    sources = metrics["sources"]
    rows = [
        (kind, found["rows"], found["rows_used"], sum(found["rejected"].values())) for kind, found in sources.items()
    ]
    shapes = [(kind, *shape) for kind, found in sources.items() for shape in found["shapes"].items()]
    rejected = [(kind, *reason) for kind, found in sources.items() for reason in found["rejected"].items()]
    aside = sum(found["left_out"] for found in sources.values())
    left_out = [(name.replace("_", " "), count) for name, count in metrics["left_out"].items()]
    return [
        "## What was read",
        _table(("data", "rows", "used", "cannot be used"), rows),
        _table(("data", "shape", "rows"), shapes),
        "### Rows that cannot be used",
        _table(("data", "reason", "rows"), rejected) if rejected else "None.",
        "### Left out",
        f"Records that repeat another: {metrics['duplicates']:,}. Answers with loss weight 0, and turns not asked for: {aside:,}.",
        *([_table(("records", "number"), left_out)] if left_out else []),
    ]


def _parts(metrics: dict[str, Any]) -> list[str]:
    shared = metrics["prompts_in_two_parts"]
    rows = [(part, SERVES[part], count, metrics["lines"][part]) for part, count in metrics["prompts"].items()]
    return [
        "## Parts",
        _table(("part", "for", "prompts", "rows"), rows),
        f"Prompts that are in two parts: {shared:,}.",
    ]


def _tokens(tokens: dict[str, Any], tokenizer: ChatTokenizer) -> list[str]:
    names = [f"p{percent}" for percent in PERCENTILES]
    rows, warnings = [], []
    for kind, figures in tokens["lengths"].items():
        limit, key = (
            (tokenizer.max_prompt, "max_prompt") if kind == "prompt" else (tokenizer.max_response, "max_response")
        )
        share = figures["cut"] / figures["count"]
        rows.append(
            (kind, *(figures[name] for name in names), figures["max"], limit, f"{figures['cut']:,} ({share:.1%})")
        )
        if share > CUT_WARNING:
            warnings.append(
                f"**WARNING**: tokens.{key} {limit} cuts {share:.1%} of the {kind} texts (a warning from {CUT_WARNING:.0%} on). "
                f"{figures['p99']:,} would leave 99% whole."
            )
    spelled = sum(figures["spell_special_tokens"] for figures in tokens["lengths"].values())
    stops = ", ".join(f"{_inline(tokenizer.decode_all([token]))} ({token})" for token in tokenizer.stop_ids)
    end = f"{_inline(tokenizer.decode_all([tokenizer.end_id]))} ({tokenizer.end_id})"
    return [
        "## Lengths in tokens",
        _table(("", *names, "max", "limit", "cut"), rows),
        "Before anything is cut, answers with their end token; p90 is the length that 90% of the texts do not exceed. Prompts are cut from the left, answers from the right.",
        *warnings,
        f"Pairs whose answers are equal after the cut, which no reward model is trained on: {tokens['pairs_equal_after_cut']:,}. "
        f"Texts that spell a special token, which is made ordinary text: {spelled:,}.",
        f"Each answer ends with {end}. Sampling stops at {stops}.",
        *(f"Note: {note}" for note in tokenizer.notes),
    ]


def _labels(labels: dict[str, float]) -> list[str]:
    pairs, accuracy = labels["pairs"], labels["length_alone_accuracy"]
    if not pairs:
        return ["## Labels", "There are no pairs."]
    longer, shorter = labels["chosen_longer_share"], labels["rejected_longer_share"]
    rule = "the longer answer is better" if longer >= shorter else "the shorter answer is better"
    text = [
        "## Labels",
        f"Of {pairs:,} pairs the chosen answer is the longer one in {longer:.1%}, the rejected one in {shorter:.1%} (in characters). "
        f'"{rule[0].upper()}{rule[1:]}" is right for {accuracy:.1%} of the pairs, a tie counted half.',
    ]
    if length_tells(labels):
        text.append(
            f"**WARNING**: length alone tells the label of {accuracy:.1%} of the pairs (a warning from {WARNING_SHARE:.0%} on, where "
            "that is two standard errors above chance). A reward model can learn length in place of quality, and PPO will "
            f"then make answers {'longer' if longer >= shorter else 'shorter'}. Balance the pairs by length, or watch length closely."
        )
    return text


def _samples(samples: list[Sample], tokenizer: ChatTokenizer) -> list[str]:
    text = ["## Samples", LEGEND]
    for number, sample in enumerate(samples, 1):
        text += _sample(number, sample, tokenizer)
    return text


def _sample(number: int, sample: Sample, tokenizer: ChatTokenizer) -> list[str]:
    prompt = tokenizer.prompt_ids(sample.prompt)
    cut = ", cut from the left" if tokenizer.is_cut(sample.prompt) else ""
    text = [f"### {number}. Part {sample.part}, prompt of {len(prompt)} tokens{cut}"]
    shown = _shown(prompt, tokenizer)
    if not sample.answers:
        text.append(_block(shown + BORDER))
    for name, answer in sample.answers.items():
        ids, was_cut = tokenizer.response_ids(answer)
        words = ids if was_cut else ids[:-1]
        end = "" if was_cut else tokenizer.decode_all(ids[-1:]) + END
        border = "|".join(_one_line(tokenizer.decode_all([token])) for token in prompt[-3:])
        border += f" {BORDER} " + "|".join(_one_line(tokenizer.decode_all([token])) for token in ids[:3])
        text += [
            f"{name}, {len(ids)} tokens{', cut from the right' if was_cut else ''}; at the border {_inline(border)}",
            _block(shown + BORDER + _shown(words, tokenizer) + end),
        ]
        shown = "(the same prompt) "
    return text


def _shown(ids: list[int], tokenizer: ChatTokenizer) -> str:
    """The ids as text with whitespace that matters made visible; a long text without its middle."""
    if len(ids) <= SHOWN_TOKENS:
        return visible(tokenizer.decode_all(ids))
    half = SHOWN_TOKENS // 2
    start, end = (visible(tokenizer.decode_all(part)) for part in (ids[:half], ids[-half:]))
    return f"{start}\n[… {len(ids) - SHOWN_TOKENS:,} tokens not shown …]\n{end}"


def visible(text: str) -> str:
    """Spaces at the ends of the text and of its lines as dots, tabs as arrows, other invisible characters by their number."""
    text = re.sub(r"\A +| +(?=\n|\Z)", lambda spaces: "·" * len(spaces[0]), text)
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in "\n ":
        return character
    if character == "\t":
        return "⇥"
    if unicodedata.category(character) in {"Cc", "Cf", "Co", "Zl", "Zp", "Zs"}:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def _one_line(text: str) -> str:
    return visible(text).replace("\n", "⏎")


def _block(text: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _inline(text: str) -> str:
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _table(header: tuple[str, ...], rows: Any) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
