"""Where rows have their prompts: in one field, or in several that are put together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.records import Message
from pipeline.data.turns import (
    BadRow,
    check_prompt,
    is_blank,
    prompt_of,
    required,
    text_of,
    turns_of,
    whole_text,
    wrong_type,
)

SYSTEM_FIELDS = ("system", "system_prompt")


@dataclass(frozen=True)
class PromptField:
    """Where a shape has its prompt. `read` raises BadRow."""

    name: str
    read: Callable[[dict[str, Any]], tuple[Message, ...]]


def with_system(row: dict[str, Any], prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt after the system message that some data keep in a field of its own."""
    for field in SYSTEM_FIELDS:
        if row.get(field) is None or is_blank(text_of(field, row[field])):
            continue
        if not prompt or prompt[0].role != "system":
            prompt = (Message("system", row[field]), *prompt)
        elif prompt[0].content.strip() != row[field].strip():
            raise BadRow(field, "text", "is there beside another system turn; leave one of them out")
    return prompt


def plain_field(name: str) -> PromptField:
    """A prompt in one field, as text or messages, with `history` before it."""
    return PromptField(name, lambda row: _after_history(row, prompt_of(name, required(row, name))))


def _question(row: dict[str, Any]) -> tuple[Message, ...]:
    *earlier, last = prompt_of("question", required(row, "question"))
    text = _joined([last.content, *_texts(row, ("context",))])
    return _after_history(row, (*earlier, replace(last, content=text)))


def _instruction(row: dict[str, Any]) -> tuple[Message, ...]:
    """Instruction and input (Dolly: context) as one user's turn, with an empty line between."""
    instruction = whole_text("instruction", required(row, "instruction"))
    text = _joined([instruction, *_texts(row, ("input", "context"))])
    return _after_history(row, (Message("user", text),))


def _texts(row: dict[str, Any], fields: tuple[str, ...]) -> list[str]:
    return [text_of(field, row[field]) for field in fields if row.get(field) is not None]


def _joined(texts: list[str]) -> str:
    """The texts that say something, with an empty line between."""
    return "\n\n".join(text for text in texts if not is_blank(text))


def _after_history(row: dict[str, Any], prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt after the turns in `history`, messages or [question, answer] pairs, and after the system message."""
    history = row.get("history") or []
    if not isinstance(history, list):
        raise wrong_type("history", history, "a list")
    if all(isinstance(turn, dict) for turn in history):
        earlier = [turn.message for turn in turns_of("history", history)] if history else []
    else:
        earlier = [message for exchange in history for message in _exchange(exchange)]
    return with_system(row, (*earlier, *prompt))


def _exchange(exchange: Any) -> tuple[Message, Message]:
    if not (isinstance(exchange, list) and len(exchange) == 2):
        raise BadRow("history", "a list", "has an entry that is neither [question, answer] nor a message")
    question, answer = (text_of("history", part) for part in exchange)
    return Message("user", question), Message("assistant", answer)


INSTRUCTION = PromptField("instruction", _instruction)
QUESTION = PromptField("question", _question)


def checked(prompt: PromptField, row: dict[str, Any]) -> tuple[Message, ...]:
    """The prompt of a row, fit to wait for an answer; raises BadRow."""
    found = prompt.read(row)
    check_prompt(prompt.name, found)
    return found
