"""JSON values -> turns of a conversation, or the reason why not."""

import re
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from pipeline.data.records import Message

ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing"),
    "system": ("system", "developer"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
TOOL_ROLES = ("tool", "function", "function_call", "tool_call", "observation", "tool_response", "ipython")
TURN_FIELDS = {"role", "from", "content", "value", "loss_weight", "weight"}
NOTHING = (None, "", "[]", "null", [], {})
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
WRITTEN_LIST = re.compile(
    r"""\s*(\[\s*\{|\{)\s*['"](role['"](?=.*['"]content['"])|content['"](?=.*['"]role['"])"""
    r"""|from['"](?=.*['"]value['"])|value['"](?=.*['"]from['"]))\s*:""",
    re.DOTALL,
)
WRITTEN_TEXTS = re.compile(r"""\s*\[\s*(['"]).*\1\s*\]\s*\Z""", re.DOTALL)
MOST_TURNS = (
    1000  # every answer gives a record with all turns before it, so work and room grow with the square of the turns
)
TYPES = {
    type(None): "null",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


class BadRow(Exception):
    """A row that cannot be used: the field concerned, the type of its value in words, and the reason."""

    def __init__(self, field: str, type_: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.type = type_
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """A message, and whether its data ask to train on it."""

    message: Message
    trained: bool = True


def type_of(value: Any) -> str:
    """What a value is, in words."""
    return TYPES.get(type(value), type(value).__name__)


def wrong_type(field: str, value: Any, wanted: str) -> BadRow:
    """The fault of a value that is not what it should be."""
    return BadRow(field, type_of(value), f"is {type_of(value)}, not {wanted}")


def is_blank(text: str) -> bool:
    """Whether nothing of the text can be seen: white space, control and zero-width characters alone."""
    return not any(letter.isprintable() and not letter.isspace() for letter in text)


def first_there(row: dict[str, Any], *fields: str) -> Any:
    """The value of the first of these fields that is there; a field that is null is not there."""
    return next((row[field] for field in fields if row.get(field) is not None), None)


def required(row: dict[str, Any], field: str) -> Any:
    """The value of a field that must be there; null is a value.

    Raises:
        BadRow: it is not there.
    """
    if field not in row:
        raise BadRow(field, "missing", "is missing")
    return row[field]


def text_of(field: str, value: Any) -> str:
    """A value that must be text which can be written again.

    Raises:
        BadRow: it is another type, or holds what is no character.
    """
    if not isinstance(value, str):
        raise wrong_type(field, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(
            field, "text", "holds bytes that are not UTF-8, or one half of an escaped pair of surrogates"
        ) from None
    return value


def whole_text(field: str, value: Any) -> str:
    """A value that must be text, and is not a list of messages in the guise of text, as a spreadsheet leaves it.

    Raises:
        BadRow: it is another type, or such a list.
    """
    text = text_of(field, value)
    if WRITTEN_LIST.match(text):
        raise BadRow(field, "text", "is a list written as text; export the data as jsonl or parquet")
    return text


def turns_of(field: str, value: Any) -> list[Turn]:
    """A list of messages with `role` and `content`, or `from` and `value`, as turns.

    Raises:
        BadRow: it is no list, or one of its turns cannot be read.
    """
    if isinstance(value, str):
        whole_text(field, value)
    if not isinstance(value, list):
        raise wrong_type(field, value, "a list of messages")
    if not value:
        raise BadRow(field, "a list", "is an empty list")
    if len(value) > MOST_TURNS:
        raise BadRow(field, "a list", f"has more than {MOST_TURNS} turns; divide it into shorter conversations")
    return [_turn(field, turn) for turn in value]


def _turn(field: str, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise BadRow(field, type_of(turn), f"has a turn that is {type_of(turn)}, not an object with role and content")
    role = first_there(turn, "role", "from")
    if is_tool_turn(turn):
        raise BadRow(
            field, "an object", f"has a turn with a tool call or its result (role {short(role)}), which is not read"
        )
    if role is None:
        raise BadRow(
            field, "an object", f"has a turn without role or from; it has {', '.join(map(short, turn)) or 'nothing'}"
        )
    if not isinstance(role, str) or role.lower() not in ROLE_OF:
        raise BadRow(field, type_of(role), f"has a turn with role {short(role)}")
    message = Message(ROLE_OF[role.lower()], _content(field, first_there(turn, "content", "value")))
    return Turn(message, _is_trained(field, message.role, turn))


def is_tool_turn(turn: dict[str, Any]) -> bool:
    """Whether a turn calls a tool, or is what the tool gave back."""
    role = first_there(turn, "role", "from")
    return role in TOOL_ROLES or any(turn.get(key) not in NOTHING for key in ("tool_calls", "function_call"))


def _content(field: str, content: Any) -> str:
    """Text, or the text of typed parts: {"type": "text", "text": …}, in some tools with "value" for the text."""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRow(field, type_of(content), f"has a turn whose content is {type_of(content)}, not text")
        return text_of(field, content)
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise BadRow(field, type_of(part), f"has a part of content that is {type_of(part)}, not an object")
        if part.get("type") != "text":
            raise BadRow(
                field, "an object", f"has a part of content of type {short(part.get('type'))}; only text is read"
            )
        texts.append(text_of(f"{field}: a part of content", first_there(part, "text", "value")))
    return "".join(texts)


def _is_trained(field: str, role: str, turn: dict[str, Any]) -> bool:
    """By `loss_weight`, or OpenAI's `weight`. Answers are trained on unless their weight is 0, other turns never."""
    weight = first_there(turn, "loss_weight", "weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow(field, type_of(weight), f"has a turn with loss weight {short(weight)}; 0 and 1 are known")
    if weight and role != "assistant":
        raise BadRow(field, "a number", f"has a {role} turn with loss weight 1; only answers are trained on")
    return bool(weight)


def is_transcript(text: str) -> bool:
    """Whether a text that may be something else is a transcript as `transcript_turns` reads it."""
    return text.startswith(("\n\nHuman:", "Human:")) and "\n\nAssistant:" in text


def transcript_turns(field: str, text: str) -> list[Message]:
    r"""The turns of "\n\nHuman: … \n\nAssistant: …", as Anthropic's HH data have them.

    Raises:
        BadRow: it is no such transcript.
    """
    pieces = HH_TURN.split(text_of(field, text))
    if len(pieces) < 3 or pieces[0].strip():
        raise BadRow(
            "prompt", "missing", f"is missing, and {field} is no '\\n\\nHuman: … \\n\\nAssistant: …' transcript"
        )
    roles = ["user" if name == "Human" else "assistant" for name in pieces[1::2]]
    return [Message(role, content.strip()) for role, content in zip(roles, pieces[2::2], strict=True)]


def prompt_of(field: str, value: Any) -> tuple[Message, ...]:
    """A prompt as text, as a transcript that waits for its answer, or as messages.

    Raises:
        BadRow: it is none of these.
    """
    if isinstance(value, list):
        return tuple(turn.message for turn in turns_of(field, value))
    if not isinstance(value, str):
        raise wrong_type(field, value, "text or a list of messages")
    if is_transcript(value):
        turns = transcript_turns(field, value)
        return tuple(turns if turns[-1].content else turns[:-1])
    if WRITTEN_TEXTS.match(value):
        raise BadRow(field, "text", "is a list written as text; export the data as jsonl or parquet")
    return (Message("user", whole_text(field, value)),)


def check_prompt(field: str, prompt: tuple[Message, ...], known: int = 0) -> None:
    """Sees to it that a conversation, of which the first `known` turns are known to be sound, can wait for an answer.

    Raises:
        BadRow: it ends otherwise, has an empty turn, or a system turn that is not its first.
    """
    if not prompt or prompt[-1].role != "user":
        raise BadRow(field, "a list", "does not end with a user's turn")
    for number, message in enumerate(prompt[known:], known):
        if is_blank(message.content):
            raise BadRow(field, "text", f"has an empty {message.role} turn")
        if number and message.role == "system":
            raise BadRow(field, "a list", "has a system turn that is not the first")


def answer_of(field: str, text: str) -> str:
    """The answer as it is.

    Raises:
        BadRow: it is empty.
    """
    if is_blank(text):
        raise BadRow(field, "text", "is empty")
    return text
