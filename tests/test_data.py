"""From records to token ids and batches."""

import json
from pathlib import Path

import pytest
from taking import pair

from pipeline.data.examples import comparisons, demonstrations, prompt_batches, prompts
from pipeline.data.records import Message
from pipeline.data.tokenization import ChatTokenizer, load_tokenizer
from pipeline.errors import BaseModelError, DataError, TrainingError
from pipeline.tiny import tiny_tokenizer

# --- tokens ---


def test_prompt_ids_are_the_template_and_the_answer_ends_once(tokenizer: ChatTokenizer) -> None:
    prompt = (Message("user", "hi"),)
    assert (
        tokenizer.tokenizer.decode(tokenizer.prompt_ids(prompt))
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids, cut = tokenizer.response_ids("yo")
    assert (tokenizer.tokenizer.decode(ids), cut) == ("yo<|im_end|>", False)


def test_the_end_token_is_trained_though_it_is_also_the_pad_token(tokenizer: ChatTokenizer) -> None:
    """Report huggingface/alignment-handbook#127: masks come from lengths, never from ids."""
    assert tokenizer.tokenizer.pad_token_id == tokenizer.end_id
    batch, counts = demonstrations([pair("a", "4"), pair("b", "four")], tokenizer)
    ends = (batch.response_ids_BR == tokenizer.end_id) & batch.response_mask_BR
    assert ends.sum(1).tolist() == [1, 1]
    assert counts == {"rows": 2, "answers_cut": 0, "trained_tokens": 2 + 5}


def test_long_prompts_lose_their_left_and_long_answers_their_right_end(tokenizer: ChatTokenizer) -> None:
    long = (Message("user", "x" * 100 + "end"),)
    assert tokenizer.is_cut(long)
    assert len(tokenizer.prompt_ids(long)) == 64
    assert tokenizer.tokenizer.decode(tokenizer.prompt_ids(long)).endswith("end<|im_end|>\n<|im_start|>assistant\n")
    ids, cut = tokenizer.response_ids("y" * 30)
    assert (tokenizer.tokenizer.decode(ids), cut) == ("y" * 24, True)


def test_pairs_that_truncation_makes_equal_are_dropped_and_counted(tokenizer: ChatTokenizer) -> None:
    """Report OpenRLHF/OpenRLHF#1311."""
    same = pair("p", "x" * 24 + " good", "x" * 24 + " bad")
    cut = pair("q", "y" * 40, "short")
    good = pair("r", "fine", "poor")
    batch, kept, counts = comparisons([same, cut, good], tokenizer, "drop")
    assert (len(batch), kept) == (1, [good])
    assert counts == {"rows": 3, "pairs_cut": 1, "pairs_equal_after_cut": 1, "pairs": 1}
    assert len(comparisons([same, cut, good], tokenizer, "keep")[0]) == 2
    with pytest.raises(TrainingError, match=r"none is left.*tokens\.max_response 24"):
        comparisons([same, cut], tokenizer, "drop")


def test_a_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    """Report EricLBuehler/mistral.rs#45: name the roles, not a symptom."""
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    tiny_tokenizer(template).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 64, 24)
    with pytest.raises(DataError, match=r"refuses a conversation of roles system, user: System role not supported"):
        tokenizer.prompt_ids((Message("system", "Be brief."), Message("user", "hi")))


def test_a_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    """Report huggingface/trl#1073."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match="has no end-of-sequence token"):
        load_tokenizer(tmp_path, 64, 24)


def test_stop_ids_join_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    """Report hiyouga/LLaMA-Factory#7454: the template ends turns with another token than eos."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    chat = load_tokenizer(tmp_path, 64, 24)
    assert chat.end_id == 2  # <|im_end|>
    assert chat.stop_ids == (0, 2, 7)


# --- prompts ---


def test_prompt_batches_are_a_function_of_seed_and_number(tokenizer: ChatTokenizer) -> None:
    questions = prompts([pair(f"q{n}") for n in range(7)], tokenizer)
    batches = list(prompt_batches(questions, 3, 4, seed=5))
    assert [[p.key for p in batch] for batch in batches[2:]] == [
        [p.key for p in batch] for batch in list(prompt_batches(questions, 3, 4, seed=5))[2:]
    ]
    assert len({p.key for batch in batches[:2] for p in batch}) == 6  # one pass, no prompt twice
