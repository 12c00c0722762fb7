"""Rows that are known but not read, with what to do about them; and fields that may be answers under other names."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.data.parsing import RANKED
from pipeline.data.turns import NOTHING, is_tool_turn


@dataclass(frozen=True)
class Refusal:
    """A shape that is known but not read."""

    title: str
    remedy: str


def _has_tools(row: dict[str, Any]) -> bool:
    if isinstance(row.get("input"), dict) and _has_tools(row["input"]):  # OpenAI's preference format
        return True
    if any(row.get(field) not in NOTHING for field in ("tools", "functions")):
        return True
    lists = (row.get(field) for field in ("messages", "conversations", "chosen_messages", "prompt"))
    turns = (turn for value in lists if isinstance(value, list) for turn in value if isinstance(turn, dict))
    return any(map(is_tool_turn, turns))


def _is_kto(row: dict[str, Any]) -> bool:
    labelled = any(str(row.get(name)).strip().lower() in LABELS for name in ("label", "kto_tag"))
    return labelled and any(row.get(name) is not None for name in LABELLED) and row.get("rejected") is None


def _has_media(row: dict[str, Any]) -> bool:
    return any(row.get(field) not in NOTHING for field in ("images", "image", "videos", "audios"))


def _is_tree(row: dict[str, Any]) -> bool:
    tree = row.get("prompt")
    return (isinstance(tree, dict) and "replies" in tree) or {"parent_id", "text", "role"} <= row.keys()


TOOLS = Refusal(
    "conversations with tool calls (tools that are offered, or turns like function_call and observation)",
    "answers are trained as plain text here; keep the rows without tools, or rewrite calls and their results as ordinary turns",
)
KTO = Refusal(
    "single answers with a label, good or bad (KTO)",
    "a reward model needs two answers to one prompt: join good and bad answers of a prompt into chosen and rejected; "
    "or keep the rows whose label is true, without the field label, as demonstrations",
)
MEDIA = Refusal(
    "conversations about images, videos or sounds",
    "only text is trained on here; keep the rows without them",
)
TREES = Refusal(
    "trees of messages (as OpenAssistant's)",
    "follow each branch from its root and write it as messages; of two replies to one message make chosen and rejected",
)
RANKINGS = Refusal(
    f"ranked answers (a prompt and a list, best first, in {', '.join(RANKED)})",
    "set data.expand_rankings: true to make a pair of every answer and every later one, or keep two as chosen and rejected",
)
RATED = Refusal(
    "prompts with a list of rated answers",
    "write the answers' texts, the best first, as responses and set data.expand_rankings: true, or keep two as chosen and rejected",
)
JUDGED = Refusal(
    "two answers and a label that says which is better",
    "write the better one as chosen and the other as rejected, and leave ties out",
)
TEXT = Refusal(
    "text alone, with no border between prompt and answer",
    "only answers are trained on here; split each text into prompt and completion, or into messages",
)
TOKENS = Refusal(
    "token ids", "ids are made here, by the base model's own tokenizer; bring the text that they were made of"
)
REFUSED: list[tuple[Callable[[dict[str, Any]], bool], Refusal]] = [
    (_has_tools, TOOLS),
    (_has_media, MEDIA),
    (_is_kto, KTO),
    (_is_tree, TREES),
]
# fields of single answers, and the values by which they are called good or bad
LABELLED = ("completion", "response", "answer", "output", "messages", "conversations")
LABELS = ("true", "false", "1", "0", "1.0", "0.0", "good", "bad", "desirable", "undesirable")
ANSWER = re.compile(
    "answer|completion|resp|output|generation|chosen|reject|prefer|repl(?:y|ies)|target|solution|summar|conversation|human_ref",
    re.IGNORECASE,
)
TWIN = re.compile(r"[ _-]?(0|1|2|a|b|j|k|left|right)$", re.IGNORECASE)  # what tells one of two answers from the other
LAST_REFUSED: list[tuple[str, Refusal]] = [
    ("text", TEXT),
    ("input_ids", TOKENS),
]  # only where there is no reading at all


def refused_row(row: dict[str, Any]) -> Refusal | None:
    """Why a row like this is never read, in a file of whatever shape."""
    return next((why for has, why in REFUSED if has(row)), None)


def refused_answers(row: dict[str, Any]) -> Refusal | None:
    """Answers of a row that has no answers by known names: two with a label, or a list of rated ones."""
    fields = may_be_answers(row, set(row))
    twins = Counter(TWIN.sub("", field) for field in fields if TWIN.search(field))
    if 2 in twins.values():
        return JUDGED
    lists = (row[field] for field in fields if isinstance(row[field], list))
    return RATED if any(len(answers) > 1 for answers in lists) else None


def may_be_answers(row: dict[str, Any], fields: set[str]) -> set[str]:
    """Those of the fields whose name speaks of an answer, and whose value can be one."""
    return {
        field
        for field in fields
        if ANSWER.search(field) and isinstance(row[field], str | list | dict) and row[field] not in NOTHING
    }
