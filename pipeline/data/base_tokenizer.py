"""A base folder -> its ChatTokenizer, checked before any weight is loaded."""

from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from pipeline.data.records import Message
from pipeline.data.templates import probe, settle_template
from pipeline.data.tokenization import ChatTokenizer, SystemRole, special_tokens
from pipeline.errors import BaseModelError, ParameterError


def load_tokenizer(
    folder: Path,
    max_prompt: int,
    max_response: int,
    system: str | None = None,
    system_role: SystemRole = "merge",
    trust_remote_code: bool = False,
) -> ChatTokenizer:
    """The tokenizer of a base folder, checked on a question before any weight is loaded.

    Raises:
        BaseModelError: it cannot be loaded, has no end token, or has ids without an embedding row.
        ParameterError: the `tokens` parameters do not fit its template or its positions.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)  # nosec B615  # a local folder
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)  # nosec B615  # a local folder
        config = whole.get_text_config()
        configured = _configured_stops(folder)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"The tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())[:200]}"
        ) from error
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise BaseModelError(
            f"The tokenizer in {folder} has no end-of-sequence token (eos_token_id is {eos}); set eos_token in its tokenizer_config.json."
        )
    notes = settle_template(tokenizer)
    layout = probe(tokenizer)
    end = _turn_end(tokenizer, layout.after_answer, eos)
    tokenizer.chat_control_tokens = []  # special tokens alone: a template may look for others, such as </think>, in past answers
    stops = tuple(sorted({eos, end, *configured}))
    chat = ChatTokenizer(
        tokenizer=tokenizer,
        end_id=end,
        stop_ids=stops,
        rows=max(*tokenizer.get_vocab().values(), *stops) + 1,
        opening_ids=tuple(tokenizer(layout.opening, add_special_tokens=False)["input_ids"]),
        has_system=layout.has_system,
        notes=(*notes, *layout.notes),
        max_prompt=max_prompt,
        max_response=max_response,
        system=system,
        system_role=system_role,
    )
    _check_rows(chat, config.vocab_size)
    _check_positions(chat, config)
    _check_probe(chat)
    return chat


def _configured_stops(folder: Path) -> set[int]:
    """The end tokens of the generation config, where there is one."""
    if not (folder / "generation_config.json").is_file():
        return set()
    configured = GenerationConfig.from_pretrained(folder).eos_token_id  # nosec B615  # a local folder
    return set(configured if isinstance(configured, list) else [configured]) - {None}


def _turn_end(tokenizer: PreTrainedTokenizerBase, after_answer: str, eos: int) -> int:
    """The token that the template puts after an answer, if it is one of the added ones; else `eos`.

    Some tokenizers do not call it special; it is made so, that text cannot forge it and decoding leaves it out.
    """
    ids = tokenizer(after_answer.lstrip(), add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    if not ids or ids[0] not in added.keys() | set(tokenizer.all_special_ids):
        return eos
    if ids[0] in added and not added[ids[0]].special:
        token = added[ids[0]]
        tokenizer.add_tokens(
            [AddedToken(token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=True)],
            special_tokens=True,
        )
    return ids[0]


def _check_rows(chat: ChatTokenizer, embedding_rows: int) -> None:
    """An id without an embedding row ends in a GPU's assertion, far from its cause."""
    if chat.rows > embedding_rows:
        token = chat.tokenizer.convert_ids_to_tokens(chat.rows - 1)
        raise BaseModelError(
            f"The tokenizer of base.model has ids up to {chat.rows - 1} ({token}) but the embedding table has {embedding_rows} rows; "
            "a token was added without a row for it: use the tokenizer that came with the model, or name a token that "
            "has a row as its pad_token or eos_token."
        )


def _check_positions(chat: ChatTokenizer, config: PretrainedConfig) -> None:
    """A token beyond GPT-2's learned positions ends in a GPU's assertion; beyond a rotary model's, in noise."""
    positions = getattr(config, "max_position_embeddings", None)  # models with relative positions alone have no limit
    longest = chat.max_prompt + chat.max_response + 1  # the reward model reads a cut answer with an end token
    if positions is not None and longest > positions:
        raise ParameterError(
            f"tokens.max_prompt is {chat.max_prompt} and tokens.max_response {chat.max_response} but with an end token they must "
            f"fit the {positions} positions of base.model; lower one, so that together they are at most {positions - 1}."
        )


def _check_probe(chat: ChatTokenizer) -> None:
    """What holds for every row, seen on one: a prompt that fits, at most one BOS, an answer with one special token, the end."""
    if chat.system is not None and not chat.has_system and chat.system_role == "fail":
        raise ParameterError(
            "tokens.system is set, but the model's chat template has no place for a system message and tokens.system_role is "
            "fail; set tokens.system to null, or tokens.system_role to merge or drop."
        )
    prompt = chat.whole_prompt_ids((Message("user", "x"),))
    response = chat.whole_response_ids("x")
    bos = chat.tokenizer.bos_token_id
    if bos is not None and prompt[:2] == [bos, bos]:
        raise BaseModelError(
            "The chat template of base.model writes the BOS token twice; take one out of chat_template."
        )
    special = [token for token in response if token in special_tokens(chat.tokenizer)]
    if len(response) < 2 or special != [chat.end_id]:
        raise BaseModelError(
            f"The tokenizer of base.model makes {chat.tokenizer.convert_ids_to_tokens(response)} of the answer 'x': "
            "its words and one end token are wanted."
        )
    if len(prompt) > chat.max_prompt:
        raise ParameterError(
            f"tokens.max_prompt is {chat.max_prompt} but the chat template and the system message make {len(prompt)} tokens of a "
            f"one-letter question; raise it to {2 * len(prompt)} or more."
        )
