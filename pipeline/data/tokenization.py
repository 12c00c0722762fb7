"""Conversations -> token ids: the one place, for every stage.

A row is the template's rendering of the prompt, then the answer's own tokens, then one end token. The prompt's ids are
therefore a prefix of the row's ids by construction, and the same whether the answer was given or will be sampled.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from pipeline.data.records import Message
from pipeline.errors import BaseModelError, DataError

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
MARKER = "ANSWERGOESHERE"


@dataclass(frozen=True)
class ChatTokenizer:
    """A base's tokenizer with its template, its end token and every token that ends an answer.

    end_id: appended to answers and trained on.
    stop_ids: sampling stops at any of them; end_id is one.
    system: put before conversations that have no system message; None leaves that to the template.
    """

    tokenizer: PreTrainedTokenizerBase
    end_id: int
    stop_ids: tuple[int, ...]
    max_prompt: int
    max_response: int
    system: str | None = None

    def prompt_ids(self, prompt: tuple[Message, ...]) -> list[int]:
        """The conversation up to where the answer starts, cut from the left to `max_prompt` tokens.

        Raises:
            DataError: the template refuses the conversation; its own words are given.
        """
        return self._whole_prompt_ids(prompt)[-self.max_prompt :]

    def is_cut(self, prompt: tuple[Message, ...]) -> bool:
        """Whether `prompt_ids` leaves something of it out."""
        return len(self._whole_prompt_ids(prompt)) > self.max_prompt

    def _whole_prompt_ids(self, prompt: tuple[Message, ...]) -> list[int]:
        if self.system is not None and prompt[0].role != "system":
            prompt = (Message("system", self.system), *prompt)
        try:
            return self.tokenizer.apply_chat_template(
                _as_dicts(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like, jinja2's errors and others
            roles = ", ".join(message.role for message in prompt)
            raise DataError(f"The model's chat template refuses a conversation of roles {roles}: {error}.") from error

    def response_ids(self, text: str) -> tuple[list[int], bool]:
        """The answer and its end token, cut from the right to `max_response` tokens; whether it was cut."""
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]
        return ids[: self.max_response], len(ids) > self.max_response

    def decode(self, ids: list[int]) -> str:
        """Text for people to read; never encoded again."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def __len__(self) -> int:
        return len(self.tokenizer)


def load_tokenizer(
    folder: Path, max_prompt: int, max_response: int, system: str | None = None, trust_remote_code: bool = False
) -> ChatTokenizer:
    """The tokenizer of a base folder.

    Raises:
        BaseModelError: it cannot be loaded or has no end token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"The tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())[:200]}"
        ) from error
    if tokenizer.chat_template is None:
        print("The tokenizer has no chat template: a plain 'User: … Assistant: …' layout is used.", flush=True)
        tokenizer.chat_template = PLAIN_TEMPLATE
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int) or not 0 <= eos < len(tokenizer):
        raise BaseModelError(
            f"The tokenizer in {folder} has no end-of-sequence token among its {len(tokenizer)} tokens (eos_token_id is {eos}); set one in its tokenizer_config.json."
        )
    end = _turn_end(tokenizer)
    end = eos if end is None else end
    stops = {eos, end}
    if (folder / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
        stops |= set(configured if isinstance(configured, list) else [configured]) - {None}
    return ChatTokenizer(tokenizer, end, tuple(sorted(stops)), max_prompt, max_response, system)


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the template puts after an assistant's answer, if it puts one."""
    turns = (Message("user", "Hello"), Message("assistant", MARKER))
    text = tokenizer.apply_chat_template(_as_dicts(turns), tokenize=False)
    after = text.partition(MARKER)[2]
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in special else None


def _as_dicts(prompt: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in prompt]
