"""Conversations -> token ids: the one place, for every stage.

A row is the template's rendering of the prompt, then the answer's own tokens, then one end token. The prompt's ids are
therefore a prefix of the row's ids by construction, and the same whether the answer was given or will be sampled.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerBase

from pipeline.data.conversations import Conversation, roles_of, system_merged, without_oldest_turns
from pipeline.data.records import Message
from pipeline.data.templates import as_dicts, shared_length
from pipeline.errors import DataError

SystemRole = Literal["merge", "drop", "fail"]


class RefusedConversation(DataError):
    """The chat template refuses a conversation."""


@dataclass(frozen=True)
class ChatTokenizer:
    """A base's tokenizer with its template, its end token and every token that ends an answer.

    end_id: appended to answers and trained on.
    stop_ids: sampling stops at any of them; end_id is one.
    rows: embedding rows that its ids need, the highest id plus one.
    opening_ids: put after the rendered prompt; empty but for templates without a generation prompt.
    has_system: the template has a place for system messages; `system_role` says what becomes of them where it has none.
    system: put before conversations that have no system message; None leaves that to the template.
    notes: what a person should know of this tokenizer, one sentence each.
    """

    tokenizer: PreTrainedTokenizerBase
    end_id: int
    stop_ids: tuple[int, ...]
    rows: int
    opening_ids: tuple[int, ...]
    has_system: bool
    notes: tuple[str, ...]
    max_prompt: int
    max_response: int
    system: str | None
    system_role: SystemRole

    def prompt_ids(self, prompt: Conversation) -> list[int]:
        """The conversation up to where the answer starts, cut from the left to `max_prompt` tokens.

        The oldest turns go first, whole, while a later user's turn remains; the system message stays. If the last turn
        alone is too long, its words lose their beginning, and what the template puts before them stays.

        Raises:
            RefusedConversation: the template refuses it; its own words are given.
        """
        while len(ids := self.whole_prompt_ids(prompt)) > self.max_prompt:
            shorter = without_oldest_turns(prompt)
            if shorter is None:
                return self._cut(ids, prompt)
            prompt = shorter
        return ids

    def whole_prompt_ids(self, prompt: Conversation) -> list[int]:
        """The conversation up to where the answer starts, however long.

        Raises:
            RefusedConversation: the template refuses it; its own words are given.
        """
        messages = self._with_system(prompt)
        # data that spells a special token is text: it can neither forge a turn nor end one
        forged = any(self.holds_special(message.content) for message in messages)
        if forged:
            messages = tuple(
                replace(message, content=self._without_end(message.content)) if message.role == "assistant" else message
                for message in messages
            )
        try:
            ids = self.tokenizer.apply_chat_template(
                as_dicts(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=forged,
            )
        except Exception as error:  # templates raise what they like, jinja2's errors and others
            raise RefusedConversation(
                f"The model's chat template refuses a conversation of roles {roles_of(messages)}: {error}; "
                "mend such rows, or leave them out."
            ) from error
        return [*ids, *self.opening_ids]

    def is_cut(self, prompt: Conversation) -> bool:
        """Whether `prompt_ids` leaves something of it out."""
        return len(self.whole_prompt_ids(prompt)) > self.max_prompt

    def response_ids(self, text: str) -> tuple[list[int], bool]:
        """The answer and its end token, cut from the right to `max_response` tokens; whether it was cut."""
        ids = self.whole_response_ids(text)
        return ids[: self.max_response], len(ids) > self.max_response

    def whole_response_ids(self, text: str) -> list[int]:
        """The answer and its end token, however long.

        An end token that the text itself spells at its end is taken off, here as in past answers, so that there is one
        and not two; special tokens that it spells elsewhere are text.
        """
        words = self.tokenizer(self._without_end(text), add_special_tokens=False, split_special_tokens=True)
        return [*words["input_ids"], self.end_id]

    def holds_special(self, text: str) -> bool:
        """Whether the text spells a special token."""
        return self._special_pattern.search(text) is not None

    def decode(self, ids: list[int]) -> str:
        """Text for people to read; never encoded again."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """The same with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def __len__(self) -> int:
        return self.rows

    def _without_end(self, answer: str) -> str:
        for spelled in self._end_texts:
            if answer.rstrip().endswith(spelled):
                answer = answer.rstrip().removesuffix(spelled)
        return answer

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        special = special_tokens(self.tokenizer)
        return tuple(special[token] for token in self.stop_ids if token in special)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, special_tokens(self.tokenizer).values())))

    def _with_system(self, prompt: Conversation) -> Conversation:
        """The conversation with the system message that it should have, where the template has a place for it."""
        if self.system is not None and prompt[0].role != "system":
            prompt = (Message("system", self.system), *prompt)
        if self.has_system or all(message.role != "system" for message in prompt):
            return prompt
        if self.system_role == "fail":
            raise DataError(
                f"A conversation of roles {roles_of(prompt)} has a system message, for which the model's chat template has no "
                "place, and tokens.system_role is fail; set it to merge or drop."
            )
        if self.system_role == "drop":
            return tuple(message for message in prompt if message.role != "system")
        return system_merged(prompt)

    def _cut(self, ids: list[int], prompt: Conversation) -> list[int]:
        """Too many ids cut from the left, what stands before the words of the last turn kept where it leaves them half the room."""
        head = self._head(prompt)
        if len(head) > self.max_prompt // 2:
            head = head[:1] if head[0] == self.tokenizer.bos_token_id else []
        return [*head, *ids[len(head) - self.max_prompt :]]

    def _head(self, prompt: Conversation) -> list[int]:
        """What the template puts before the words of the last turn: what two conversations that differ only in them share."""
        one, other = (self.whole_prompt_ids((*prompt[:-1], replace(prompt[-1], content=words))) for words in "0x")
        return one[: shared_length(one, other)]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids and spellings of those that no text may forge."""
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | added
