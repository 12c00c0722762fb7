"""Conversations -> token ids: the same in every stage, under every style of template, worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_styles import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN_CLOSED, STYLES, Style, hand, save_and_load
from taking import pair
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pipeline.backbone import Backbone
from pipeline.comparison import answer
from pipeline.data.acceptance import refuse_conversations
from pipeline.data.examples import comparisons, demonstrations, prompts
from pipeline.data.records import Demonstration, Message, Pair, PromptOnly, Record
from pipeline.data.templates import PLAIN
from pipeline.data.tokenization import ChatTokenizer
from pipeline.data.turns import BadRow
from pipeline.errors import BaseModelError, DataError, ParameterError, TrainingError
from pipeline.params.reward_terms import LengthPenaltyTerm
from pipeline.rewards import Rewards
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate
from pipeline.tiny import tiny_tokenizer

CONVERSATION = (
    Message("system", "Be brief."),
    Message("user", "hi"),
    Message("assistant", "yo"),
    Message("user", "why?"),
)
HI = (Message("user", "hi"),)


# --- the same ids in every stage ---


@pytest.mark.parametrize("name", STYLES)
def test_ids_are_those_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    """At most one BOS, though Llama-3, Mistral and Gemma write it in the template and their tokenizers add one by themselves."""
    style = STYLES[name]
    chat = style.load(tmp_path)
    assert chat.whole_prompt_ids(CONVERSATION) == chat.prompt_ids(CONVERSATION) == style.prompt
    assert chat.response_ids("no") == (hand("no", style.end_id), False)
    assert (chat.end_id, chat.stop_ids) == (style.end_id, style.stop_ids)


@pytest.mark.parametrize("name", STYLES)
def test_all_stages_see_the_same_ids(name: str, tmp_path: Path, make_backbone: Callable[..., Backbone]) -> None:
    """SFT, reward model, rollout and evaluation. A prompt is a strict prefix of its rows. Report huggingface/trl#6105."""
    style = STYLES[name]
    chat = style.load(tmp_path)
    rows = [Pair(CONVERSATION, "no", "never")]
    chosen, rejected = hand("no", style.end_id), hand("never", style.end_id)

    sft, _ = demonstrations(rows, chat)
    assert sft.tokens_BT.tolist() == [style.prompt + chosen]
    reward, _, _ = comparisons(rows, chat, "drop")
    assert reward.chosen.tokens_BT.tolist() == [style.prompt + chosen]
    assert reward.rejected.tokens_BT.tolist() == [style.prompt + rejected]
    for batch in (sft, reward.chosen, reward.rejected):
        assert batch.prompt_lengths_B.tolist() == [len(style.prompt)]

    policy = Policy(make_backbone(), "sft", 1.0, 64)
    sampling = Sampling(4, chat.stop_ids, chunk=4, seed=0)
    questions = prompts(rows, chat)
    rollout = generate(policy, questions, sampling, step=3)
    rewards = Rewards([LengthPenaltyTerm(term="length_penalty", weight=1.0, target=4)], {}, questions, chat, None, 4)
    evaluated = answer(policy, rewards, {}, questions, sampling, chat, microbatch_tokens=100).rollout
    for found in (rollout, evaluated):
        assert found.prompt_lengths_B.tolist() == [len(style.prompt)]
        assert found.tokens_BT[0, : len(style.prompt)].tolist() == style.prompt


def test_prompts_are_lists_of_ids_whatever_the_library_returns(tokenizer: ChatTokenizer) -> None:
    """Report huggingface/trl#6105: a dict's length was taken for the prompt's."""
    assert tokenizer.prompt_ids(HI) == hand(1, "user\nhi", 2, "\n", 1, "assistant\n")


def test_answers_are_found_by_length_and_never_by_searching_ids(tmp_path: Path) -> None:
    """Report huggingface/trl#598: " 4" is one token in a sentence, and "4" another alone.

    The tokenizer merges a space (Ġ, id 32 + 191) with the 4 after it; prompt and answer meet between the two.
    """
    tokenizer = tiny_tokenizer(
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}{{ 'Answer: ' }}"
    )
    vocabulary = tokenizer.get_vocab() | {"Ġ4": 259}
    tokenizer.backend_tokenizer.model = models.BPE(vocab=vocabulary, merges=[("Ġ", "4")])
    chat = save_and_load(tokenizer, tmp_path)
    assert chat.tokenizer("Answer: 4", add_special_tokens=False)["input_ids"] == [*hand("Answer:"), 259]
    batch, counts = demonstrations([pair("2+2?", "4")], chat)
    assert batch.tokens_BT.tolist() == [hand("user: 2+2?\nAnswer: 4", 2)]
    assert batch.response_ids_BR[batch.response_mask_BR].tolist() == hand("4", 2)
    assert counts["trained_tokens"] == 2


def test_the_end_token_is_trained_though_it_is_also_the_pad_token(tokenizer: ChatTokenizer) -> None:
    """Report huggingface/alignment-handbook#127: masks come from lengths, never from ids."""
    assert tokenizer.tokenizer.pad_token_id == tokenizer.end_id
    batch, counts = demonstrations([pair("a", "4"), pair("b", "four")], tokenizer)
    ends = (batch.response_ids_BR == tokenizer.end_id) & batch.response_mask_BR
    assert ends.sum(1).tolist() == [1, 1]
    assert counts == {"rows": 2, "answers_cut": 0, "trained_tokens": 2 + 5}


def test_sampled_ids_are_scored_as_they_were_sampled(
    tokenizer: ChatTokenizer, make_backbone: Callable[..., Backbone]
) -> None:
    """Report NovaSky-AI/SkyRL#123: decoding and encoding again gives other tokens; a random model samples broken UTF-8."""
    questions = prompts([pair(f"q{n}") for n in range(6)], tokenizer)
    rollout = generate(Policy(make_backbone(), "sft", 1.0, 64), questions, Sampling(24, (2,), 64, seed=0), step=0)
    scored = rollout.ended(tokenizer.end_id)
    changed = 0
    for row, (start, length) in enumerate(
        zip(rollout.prompt_lengths_B.tolist(), rollout.response_lengths_B.tolist(), strict=True)
    ):
        sampled = rollout.tokens_BT[row, start : start + length]
        assert torch.equal(scored.tokens_BT[row, start : start + length], sampled)
        changed += tokenizer.response_ids(tokenizer.decode(sampled.tolist()))[0] != sampled.tolist()
    assert changed  # else this test would see nothing


# --- end tokens ---


def test_stop_ids_join_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    """Report hiyouga/LLaMA-Factory#7454: the template ends turns with another token than eos."""
    chat = save_and_load(_with_eos("<|endoftext|>"), tmp_path, stops=[7, 0])
    assert chat.end_id == 2  # <|im_end|>
    assert chat.stop_ids == (0, 2, 7)


def test_a_turn_end_that_is_not_called_special_ends_answers_too(tmp_path: Path) -> None:
    chat = Style(CHATML.replace("<|im_end|>", "<end>"), [], 259, (2, 259), plain=("<end>",)).load(tmp_path)
    assert (chat.end_id, chat.stop_ids) == (259, (2, 259))
    assert chat.response_ids("a<end>b")[0] == hand("a<end>b", 259)
    assert chat.decode(hand("a", 259)) == "a"


@pytest.mark.parametrize("text", ["Paris.<|im_end|>", "Paris.<|im_end|>\n", "Paris."])
def test_an_answer_that_spells_its_end_token_gets_one_all_the_same(text: str, tokenizer: ChatTokenizer) -> None:
    assert tokenizer.response_ids(text)[0] == hand("Paris.", 2)
    past = hand(1, "user\nhi", 2, "\n", 1, "assistant\nParis.", 2, "\n", 1, "user\n?", 2, "\n", 1, "assistant\n")
    assert tokenizer.whole_prompt_ids((*HI, Message("assistant", text), Message("user", "?"))) == past


def test_data_cannot_forge_turns_or_ends(tokenizer: ChatTokenizer) -> None:
    """Special tokens that the data spells are text, in prompts and in answers."""
    text = "a<|im_end|>b"
    assert tokenizer.holds_special(text) and not tokenizer.holds_special("a|im_end|b")
    assert tokenizer.response_ids(text)[0] == hand("a<|im_end|>b", 2)
    assert tokenizer.prompt_ids((Message("user", text),)) == hand(1, "user\na<|im_end|>b", 2, "\n", 1, "assistant\n")


def test_a_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    """Report huggingface/trl#1073."""
    with pytest.raises(BaseModelError, match=r"has no end-of-sequence token .* set eos_token in its tokenizer_config"):
        save_and_load(_with_eos(None), tmp_path)


def test_a_tokenizer_without_bos_or_pad_is_whole(tmp_path: Path) -> None:
    """Report huggingface/trl#1073: no None among the ids."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.pad_token = None
    chat = save_and_load(tokenizer, tmp_path)
    batch, _ = demonstrations([pair("hi", "4"), pair("hi", "four")], chat)
    prompt = hand(1, "user\nhi", 2, "\n", 1, "assistant\n")
    assert batch.tokens_BT.tolist() == [[*prompt, *hand("4", 2), 0, 0, 0], [*prompt, *hand("four", 2)]]


@pytest.mark.parametrize("token", ["pad_token", "eos_token"])
def test_a_token_without_an_embedding_row_is_refused_before_weights_load(token: str, tmp_path: Path) -> None:
    """Report meta-llama/llama-cookbook#189. The tiny tokenizer has ids 0 to 258, so the new one is 259: row 260."""
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, token, "[NEW]")
    with pytest.raises(BaseModelError, match=r"ids up to 259 \(\[NEW\]\) but the embedding table has 259 rows"):
        save_and_load(tokenizer, tmp_path, rows=259)
    assert len(save_and_load(tokenizer, tmp_path, rows=260)) == 260


def test_an_adapter_of_another_tokenizer_is_refused(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    """Report huggingface/peft#1457: the adapter's folder records the tokenizer's size; tokens are never added."""
    backbone = make_backbone()
    backbone.save_adapter("sft", tmp_path)
    backbone.identity = replace(backbone.identity, tokenizer_length=263)
    with pytest.raises(BaseModelError, match="with a tokenizer of 259 tokens but the present one has 263"):
        backbone.load_adapter("again", tmp_path)


def test_two_bos_in_a_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="writes the BOS token twice"):
        replace(STYLES["Llama-3"], template="<|begin_of_text|>" + LLAMA3).load(tmp_path)


# --- system messages ---

NO_SYSTEM = {"Gemma raises": GEMMA, "Mistral raises of alternation": MISTRAL, "left out": None}


@pytest.mark.parametrize("name", NO_SYSTEM)
def test_system_messages_follow_the_policy_where_there_is_no_place(name: str, tmp_path: Path) -> None:
    """Report EricLBuehler/mistral.rs#45: the template is probed once; merge, drop or fail by parameter."""
    silent = CHATML.replace("{{ '<|im_start|>'", "{{ '' if message['role'] == 'system' else '<|im_start|>'")
    style = replace(
        STYLES["Gemma"],
        template=NO_SYSTEM[name] or silent,
        special=("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>", "</s>"),
    )
    merged, dropped, failing = (style.load(tmp_path, system_role=policy) for policy in ("merge", "drop", "fail"))
    asked = (Message("system", "Be brief."), *HI)
    assert merged.prompt_ids(asked) == merged.prompt_ids((Message("user", "Be brief.\n\nhi"),))
    assert dropped.prompt_ids(asked) == dropped.prompt_ids(HI)
    assert failing.prompt_ids(HI) == dropped.prompt_ids(HI)
    with pytest.raises(
        DataError, match=r"roles system, user has a system message.* no place.* tokens\.system_role is fail"
    ):
        failing.prompt_ids(asked)
    assert any("no place for system messages" in note for note in merged.notes)


def test_the_system_parameter_follows_the_same_policy(tmp_path: Path) -> None:
    style = STYLES["Gemma"]
    assert style.load(tmp_path, system="Be brief.").prompt_ids(HI) == hand(
        259, 260, "user\nBe brief.\n\nhi", 261, "\n", 260, "model\n"
    )
    assert style.load(tmp_path, system="S", system_role="drop").prompt_ids(HI) == hand(
        259, 260, "user\nhi", 261, "\n", 260, "model\n"
    )
    with pytest.raises(ParameterError, match=r"tokens\.system is set, but .*set tokens\.system to null"):
        style.load(tmp_path, system="S", system_role="fail")


def test_the_system_parameter_goes_before_conversations_without_one(tmp_path: Path) -> None:
    chat = STYLES["ChatML"].load(tmp_path, system="S")
    assert chat.prompt_ids(HI) == hand(1, "system\nS", 2, "\n", 1, "user\nhi", 2, "\n", 1, "assistant\n")
    assert chat.prompt_ids(CONVERSATION) == STYLES["ChatML"].prompt


def test_a_template_that_refuses_is_quoted_with_the_roles(tmp_path: Path) -> None:
    """Report EricLBuehler/mistral.rs#45: name the roles, not a symptom alone."""
    chat = STYLES["Mistral"].load(tmp_path)
    two_in_a_row = (Message("user", "a"), Message("user", "b"))
    with pytest.raises(
        DataError,
        match=r"refuses a conversation of roles user, user: Conversation roles must alternate.*mend such rows",
    ):
        chat.prompt_ids(two_in_a_row)


# --- templates ---


def test_thinking_of_earlier_turns_is_stripped_alike_everywhere(tmp_path: Path) -> None:
    """A past answer loses its thinking; an answer to train on keeps it, with the tokens that the tokenizer has for it."""
    chat = STYLES["Qwen"].load(tmp_path)
    thought = replace(CONVERSATION[2], content="<think>\nhm\n</think>\n\nyo")
    assert chat.prompt_ids((*CONVERSATION[:2], thought, CONVERSATION[3])) == STYLES["Qwen"].prompt
    assert chat.response_ids("<think>a</think>b")[0] == hand(259, "a", 260, "b", 2)
    assert r"writes '' before a new answer and '<think>\n\n</think>\n\n' before a past one" in " ".join(chat.notes)


def test_an_empty_thinking_block_of_the_generation_prompt_is_trained_after_as_it_is_sampled_after(
    tmp_path: Path,
) -> None:
    """Report huggingface/trl#6105, the sibling trl#5213: such a prompt is no prefix of the template's own conversation."""
    chat = replace(STYLES["Qwen"], template=QWEN_CLOSED).load(tmp_path)
    prompt = hand(1, "user\nhi", 2, "\n", 1, "assistant\n", 259, "\n\n", 260, "\n\n")
    assert [question.ids for question in prompts([pair("hi")], chat)] == [prompt]
    batch, _ = demonstrations([pair("hi", "yo")], chat)
    assert batch.tokens_BT.tolist() == [prompt + hand("yo", 2)]


def test_a_template_without_generation_prompt_still_opens_the_answer(tmp_path: Path) -> None:
    """Nothing is asked of a template but to render messages."""
    chat = Style(CHATML.partition("{% if add_generation_prompt %}")[0], [], 2, (2,)).load(tmp_path)
    assert chat.prompt_ids(HI) == hand(1, "user\nhi", 2, "\n", 1, "assistant\n")
    assert r"no generation prompt: '<|im_start|>assistant\n' is put" in " ".join(chat.notes)


def test_generation_markers_in_a_template_change_nothing(tmp_path: Path) -> None:
    """Report marin-community/marin#7237: masks come from lengths, so a template may have such markers or not."""
    marked = CHATML.replace(
        "message['content'] +", "'' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{"
    )
    chat = Style(marked, [], 2, (2,)).load(tmp_path)
    assert chat.prompt_ids(CONVERSATION) == STYLES["ChatML"].prompt
    assert (chat.end_id, chat.notes) == (2, ())


def test_a_base_without_template_gets_a_plain_one_and_its_own_bos(tmp_path: Path) -> None:
    style = Style(None, [], 260, (260,), special=("<s>", "</s>"), bos="<s>", eos="</s>", adds_bos=True)
    chat = style.load(tmp_path)
    assert chat.prompt_ids(HI) == hand(259, "User:\nhi\n\nAssistant:\n")
    assert chat.tokenizer.chat_template == "{{ bos_token }}" + PLAIN
    assert chat.notes == (
        "The tokenizer has no chat template: a plain layout of 'User:' and 'Assistant:' lines is used.",
    )


def test_a_date_in_the_template_does_not_change_from_day_to_day(tmp_path: Path) -> None:
    """Llama 3.1 writes today's date into the system message: prompts of SFT and PPO would differ by a day."""
    chat = Style("{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML, [], 2, (2,)).load(tmp_path)
    assert chat.prompt_ids(HI) == hand("Today Date: 26 Jul 2024\n", 1, "user\nhi", 2, "\n", 1, "assistant\n")
    assert "26 Jul 2024" in chat.notes[0]


@pytest.mark.parametrize("template", ["{{ messages[1]['content'] }}", "{{ 'fixed' }}", "{{ raise_exception('no') }}"])
def test_a_template_that_cannot_render_a_question_and_its_answer_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"chat template of base\.model .* mend chat_template"):
        save_and_load(tiny_tokenizer(template), tmp_path)


# --- truncation ---


def test_long_answers_lose_their_right_end(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.response_ids("y" * 23) == (hand("y" * 23, 2), False)
    assert tokenizer.response_ids("y" * 24) == (hand("y" * 24), True)


def test_a_long_last_turn_loses_the_beginning_of_its_words(tmp_path: Path) -> None:
    """Of 64 tokens the template takes 6 before the words and 13 after; 45 are left."""
    chat = STYLES["ChatML"].load(tmp_path, max_prompt=64)
    long = (Message("user", "x" * 100 + "end"),)
    assert chat.is_cut(long) and not chat.is_cut(HI)
    assert chat.prompt_ids(long) == hand(1, "user\n", "x" * 42 + "end", 2, "\n", 1, "assistant\n")


def test_the_oldest_turns_go_first_and_the_system_message_stays(tmp_path: Path) -> None:
    turns = [Message(role, f"{role} {n}") for n in range(5) for role in ("user", "assistant")][:-1]
    chat = STYLES["ChatML"].load(tmp_path, max_prompt=90)
    # 13 for the system message, 14 + 24 for "user n" and "assistant n", 14 + 11 for the question: 76, and 114 with one turn more
    expected = hand(1, "system\nSys", 2, "\n", 1, "user\nuser 3", 2, "\n", 1, "assistant\nassistant 3", 2, "\n")
    expected += hand(1, "user\nuser 4", 2, "\n", 1, "assistant\n")
    assert chat.prompt_ids((Message("system", "Sys"), *turns)) == expected
    assert len(expected) == 76


def test_a_system_message_that_fills_the_prompt_is_cut_but_not_the_bos(tmp_path: Path) -> None:
    chat = STYLES["Llama-3"].load(tmp_path, max_prompt=40)
    ids = chat.prompt_ids((Message("system", "s" * 100), Message("user", "hi")))
    tail = hand(262, 260, "user", 261, "\n\nhi", 262, 260, "assistant", 261, "\n\n")
    assert ids == [259, *hand("s" * (39 - len(tail))), *tail]


def test_a_limit_below_what_the_template_writes_is_refused(tmp_path: Path) -> None:
    """<|im_start|>user, line break, x, <|im_end|>, line break, <|im_start|>assistant, line break: 20 tokens."""
    with pytest.raises(
        ParameterError, match=r"tokens\.max_prompt is 19 but .* make 20 tokens .* raise it to 40 or more"
    ):
        STYLES["ChatML"].load(tmp_path, max_prompt=19)


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


def _with_eos(token: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = token
    return tokenizer


def test_rows_that_the_template_refuses_are_rejects_with_their_line(tmp_path: Path) -> None:
    """Two user's turns in a row, under a template that wants alternation; the row before and the one after are kept."""
    chat = STYLES["Mistral"].load(tmp_path)
    odd = (Message("user", "a"), Message("user", "b"))
    kept: list[Record] = []
    keep = refuse_conversations(chat, kept.extend)
    keep((Demonstration(odd[:1], "yes"),))
    with pytest.raises(BadRow, match=r"has the roles user, user, which the model's chat template refuses"):
        keep((Demonstration(odd, "yes"),))
    keep((PromptOnly(odd[1:]),))
    assert [len(record.prompt) for record in kept] == [1, 1]
