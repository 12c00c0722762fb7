"""What a model needs beside its weights so that plain transformers asks it as the pipeline did: chat template, stop tokens, padding."""

from copy import deepcopy

from transformers import GenerationConfig, PreTrainedTokenizerBase

from pipeline.data.tokenization import ChatTokenizer

WITH_SYSTEM = "{% if messages[0]['role'] != 'system' %}{% set messages = [{'role': 'system', 'content': SYSTEM}] + messages %}{% endif %}"
MERGED = (
    "{% if messages[0]['role'] == 'system' and messages | length > 1 %}{% set messages = [{'role': messages[1]['role'], "
    "'content': messages[0]['content'] + '\n\n' + messages[1]['content']}] + messages[2:] %}{% endif %}"
)
DROPPED = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
SCORED = (
    "{% set scored = messages[-1]['content'] if messages[-1]['role'] == 'assistant' else none %}"
    "{% if scored is not none %}{% set messages = messages[:-1] %}{% set add_generation_prompt = true %}{% endif %}"
)


def policy_tokenizer(chat: ChatTokenizer) -> PreTrainedTokenizerBase:
    """The tokenizer whose own chat template gives the pipeline's prompts: `tokens.system` and what opens an answer are in it."""
    tokenizer = deepcopy(chat.tokenizer)
    tokenizer.chat_template = chat_template(chat)
    tokenizer.pad_token = tokenizer.pad_token or _text(chat, chat.end_id)
    tokenizer.padding_side = "left"  # answers are sampled at the right
    return tokenizer


def reward_tokenizer(chat: ChatTokenizer) -> PreTrainedTokenizerBase:
    """The same for whole conversations: a last answer ends with the end token, where its score is read, and nothing follows it.

    Its padding is another token than that end: transformers reads the score at the last token that is no padding.
    """
    tokenizer = policy_tokenizer(chat)
    after = "{{ scored + " + _quoted(_text(chat, chat.end_id)) + " if scored is not none else '' }}"
    tokenizer.chat_template = f"{SCORED}\n{tokenizer.chat_template}{after}"
    tokenizer.pad_token = _text(chat, padding_beside(chat))
    tokenizer.padding_side = "right"
    return tokenizer


def padding_beside(chat: ChatTokenizer) -> int:
    """A token that is not the end of an answer, the likeliest to be meant for padding first."""
    tokenizer = chat.tokenizer
    named = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids)
    return next(token for token in (*named, 0, 1) if token is not None and token != chat.end_id)


def chat_template(chat: ChatTokenizer) -> str:
    """The template with what `tokens` adds to it, as Jinja: a default system message, where it goes, what opens an answer."""
    before = ""
    if chat.system is not None:
        before += WITH_SYSTEM.replace("SYSTEM", _quoted(chat.system))
    if not chat.has_system:
        before += {"merge": MERGED, "drop": DROPPED, "fail": ""}[chat.system_role]
    template = chat.tokenizer.chat_template
    if before:
        template = f"{before}\n{template}"  # that line break goes with the block before it
    if chat.opening_ids:
        opening = _quoted(chat.tokenizer.decode(list(chat.opening_ids)))
        template = template.removesuffix("\n") + "{{ " + opening + " if add_generation_prompt else '' }}"
    return template


def generation_config(chat: ChatTokenizer, temperature: float, pad_id: int) -> GenerationConfig:
    """Sampling as in training: from the whole distribution, until one of the stop tokens."""
    return GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        max_new_tokens=chat.max_response,
        bos_token_id=chat.tokenizer.bos_token_id,
        eos_token_id=list(chat.stop_ids),
        pad_token_id=pad_id,
    )


def _text(chat: ChatTokenizer, token: int) -> str:
    return chat.tokenizer.convert_ids_to_tokens(token)


def _quoted(text: str) -> str:
    """As a string of Jinja's."""
    return repr(text)
