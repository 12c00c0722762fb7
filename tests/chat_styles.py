"""Six styles of chat templates, written for the tests, on a byte-level tokenizer whose ids can be worked out by hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, GenerationConfig

from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.tokenization import ChatTokenizer
from pipeline.tiny import CHATML, tiny_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As Qwen3's: a past answer loses its thinking, an answer at the end gets an empty block, the generation prompt has none.
QWEN = (
    "{% for message in messages %}{% set words = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set words = words.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set words = '<think>\n\n</think>\n\n' + words %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + words + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The other kind: the generation prompt ends in an empty block, which past answers have not.
QWEN_CLOSED = QWEN.replace("{% if loop.last %}", "{% if false %}").replace(
    "assistant\n' }}", "assistant\n<think>\n\n</think>\n\n' }}"
)

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = PRINTABLE + [byte for byte in range(256) if byte not in PRINTABLE]  # GPT-2's order
BYTE_IDS = {byte: 3 + place for place, byte in enumerate(BYTES)}  # after three special tokens


def hand(*parts: str | int) -> list[int]:
    """Ids by hand: an int is a special token, text is its UTF-8 bytes."""
    return [
        token for part in parts for token in ([part] if isinstance(part, int) else map(BYTE_IDS.get, part.encode()))
    ]


@dataclass(frozen=True)
class Style:
    """A template with its tokens, and what CONVERSATION and ANSWER are under it.

    special, plain: added to the tokenizer from id 259 on; "plain" ones are not special.
    adds_bos: the tokenizer itself puts a BOS before every text, as Llama's do.
    """

    template: str | None
    prompt: list[int]
    end_id: int
    stop_ids: tuple[int, ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|im_end|>"
    adds_bos: bool = False

    def load(self, folder: Path, **settings: Any) -> ChatTokenizer:
        """The style's tokenizer, saved to a folder and loaded as a stage does it."""
        tokenizer = tiny_tokenizer(self.template)
        tokens = [AddedToken(token, special=True) for token in self.special]
        tokenizer.add_tokens([*tokens, *(AddedToken(token, special=False) for token in self.plain)])
        tokenizer.bos_token, tokenizer.eos_token = self.bos, self.eos
        if self.adds_bos:
            bos = (self.bos, tokenizer.convert_tokens_to_ids(self.bos))
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{self.bos} $A", special_tokens=[bos]
            )
        return save_and_load(tokenizer, folder, **settings)


def save_and_load(tokenizer: Any, folder: Path, rows: int = 320, stops: Any = None, **settings: Any) -> ChatTokenizer:
    """A tokenizer beside a config of `rows` embedding rows and a generation config that stops at `stops`."""
    tokenizer.save_pretrained(folder)
    AutoConfig.for_model("llama", vocab_size=rows).save_pretrained(folder)
    if stops is not None:
        GenerationConfig(eos_token_id=stops).save_pretrained(folder)
    return load_tokenizer(folder, **({"max_prompt": 200, "max_response": 24} | settings))


# The conversation: system "Be brief.", user "hi", assistant "yo", user "why?".
STYLES = {
    "ChatML": Style(
        CHATML,
        hand(1, "system\nBe brief.", 2, "\n", 1, "user\nhi", 2, "\n", 1, "assistant\nyo", 2, "\n", 1, "user\nwhy?", 2, "\n", 1, "assistant\n"),
        end_id=2,
        stop_ids=(2,),
        bos="<|im_start|>",
    ),
    "Llama-3": Style(
        LLAMA3,
        hand(259, 260, "system", 261, "\n\nBe brief.", 262, 260, "user", 261, "\n\nhi", 262)
        + hand(260, "assistant", 261, "\n\nyo", 262, 260, "user", 261, "\n\nwhy?", 262, 260, "assistant", 261, "\n\n"),
        end_id=262,
        stop_ids=(262, 263),
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        adds_bos=True,
    ),
    "Mistral": Style(
        MISTRAL,
        hand(259, "[INST] Be brief.\n\nhi [/INST] yo", 260, "[INST] why? [/INST]"),
        end_id=260,
        stop_ids=(260,),
        special=("<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        adds_bos=True,
    ),
    "Gemma": Style(
        GEMMA,
        hand(259, 260, "user\nBe brief.\n\nhi", 261, "\n", 260, "model\nyo", 261, "\n", 260, "user\nwhy?", 261, "\n", 260, "model\n"),
        end_id=261,
        stop_ids=(261, 262),
        special=("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
    ),
    "Qwen": Style(
        QWEN,
        hand(1, "system\nBe brief.", 2, "\n", 1, "user\nhi", 2, "\n", 1, "assistant\nyo", 2, "\n", 1, "user\nwhy?", 2, "\n", 1, "assistant\n"),
        end_id=2,
        stop_ids=(0, 2),
        plain=("<think>", "</think>"),
        eos="<|endoftext|>",
    ),
    "none": Style(
        None,
        hand("System:\nBe brief.\n\nUser:\nhi\n\nAssistant:\nyo", 0, "\n\nUser:\nwhy?\n\nAssistant:\n"),
        end_id=0,
        stop_ids=(0,),
        eos="<|endoftext|>",
    ),
}  # fmt: skip
