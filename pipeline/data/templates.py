"""What a tokenizer's chat template does, seen by rendering it; no model's name is looked at, no template is parsed."""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pipeline.data.records import Message
from pipeline.errors import BaseModelError

# For bases without a template. Roles stand on lines of their own: a line break parts tokens where a space would join
# the answer's first word. A past answer ends as a sampled one does.
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ':\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' }}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
DATE = datetime.date(2024, 7, 26)  # what Llama 3's template writes where it has no clock
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
QUESTION, ANSWER, SYSTEM = "Hello", "ANSWERGOESHERE", "SYSTEMGOESHERE"


@dataclass(frozen=True)
class Layout:
    """What was seen of a template.

    opening: text to put after a rendered prompt so that the answer can start; empty where the template does it itself.
    after_answer: text that the template puts after an answer.
    has_system: a system message shows in the rendering.
    notes: what a person should know, one sentence each.
    """

    opening: str
    after_answer: str
    has_system: bool
    notes: tuple[str, ...]


def settle_template(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Gives the tokenizer the one template that every stage will use; what a person should know of it.

    That is its own, with the date fixed, or the plain layout.

    Raises:
        BaseModelError: it has several and none is the default.
    """
    if not tokenizer.chat_template:
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos else "") + PLAIN
        return ["The tokenizer has no chat template: a plain layout of 'User:' and 'Assistant:' lines is used."]
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise BaseModelError(f"base.model has chat templates but none for chats: {error}.") from error
    tokenizer.chat_template = CLOCK.sub(lambda call: repr(DATE.strftime(call[2])), template)
    if tokenizer.chat_template == template:
        return []
    return [f"The chat template writes the present date: {DATE:%d %b %Y} instead, so that prompts stay what they are."]


def probe(tokenizer: PreTrainedTokenizerBase) -> Layout:
    """Renders a question with and without an answer and a system message.

    Raises:
        BaseModelError: the template cannot render a question and an answer.
    """
    question = Message("user", QUESTION)
    try:
        prompt = render(tokenizer, [question], True)
        asked = render(tokenizer, [question], False)
        answered = render(tokenizer, [question, Message("assistant", ANSWER)], False)
    except Exception as error:  # templates raise what they like, jinja2's errors and others
        raise BaseModelError(
            f"The chat template of base.model cannot render one question and its answer: {error}; mend chat_template."
        ) from error
    if not prompt.strip() or QUESTION not in prompt or ANSWER not in answered:
        raise BaseModelError(
            "The chat template of base.model leaves out the question or its answer; mend chat_template."
        )
    before, _, after = answered.partition(ANSWER)
    opening = ""
    if prompt == asked and before.startswith(prompt) and before.removeprefix(prompt).strip():
        opening = before.removeprefix(prompt)
    has_system = _shows_system(tokenizer, question)
    return Layout(opening, after, has_system, tuple(_notes(prompt + opening, before, opening, has_system)))


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], for_answer: bool) -> str:
    """The conversation as text; with `for_answer` up to where the template lets an answer start."""
    return tokenizer.apply_chat_template(as_dicts(messages), add_generation_prompt=for_answer, tokenize=False)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages in the form that templates read."""
    return [{"role": message.role, "content": message.content} for message in messages]


def shared_length(one: Sequence, other: Sequence) -> int:
    """How many items two sequences have in common from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))


def _shows_system(tokenizer: PreTrainedTokenizerBase, question: Message) -> bool:
    try:
        return SYSTEM in render(tokenizer, [Message("system", SYSTEM), question], True)
    except Exception:  # some templates say no by raising what they like, others leave the message out
        return False


def _notes(prompt: str, past: str, opening: str, has_system: bool) -> list[str]:
    notes = []
    if opening:
        notes.append(f"The chat template has no generation prompt: {opening!r} is put where an answer starts.")
    shared = shared_length(prompt, past)
    if prompt[shared:].strip() or past[shared:].strip():
        notes.append(
            f"The chat template writes {prompt[shared:]!r} before a new answer and {past[shared:]!r} before a past one; "
            "answers are trained as they are sampled, after the former."
        )
    if not has_system:
        notes.append(
            "The chat template has no place for system messages; tokens.system_role says what becomes of them."
        )
    return notes
