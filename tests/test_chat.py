"""`make chat`: three roles on one base, each with its own history."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline import chat as chat_module
from pipeline.backbone import Backbone
from pipeline.chat import HELP, Chat, lines, show
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.examples import Prompt
from pipeline.data.tokenization import ChatTokenizer
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate


@pytest.fixture
def chat(make_backbone: Callable[..., Backbone], tiny_folders: Callable) -> Chat:
    backbone = make_backbone(adapters=("sft", "policy"))
    with torch.no_grad():
        for parameter in backbone.adapter_parameters("sft") + backbone.adapter_parameters("policy"):
            parameter.mul_(30)  # so far from one another that they say different things
    tokenizer: ChatTokenizer = load_tokenizer(tiny_folders(), max_prompt=200, max_response=20)
    roles = {name: Policy(backbone, None if name == "base" else name, 1.0, 16) for name in ("base", "sft", "policy")}
    return Chat(roles, tokenizer, Sampling(20, tokenizer.stop_ids, chunk=1, seed=1))


def test_each_role_hears_its_own_answers(chat: Chat) -> None:
    first, second = chat.ask("hi"), chat.ask("why?")
    assert len(set(first.values())) == 3  # random adapters, three different models
    for name in chat.roles:
        roles = [(message.role, message.content) for message in chat.history[name]]
        assert roles == [("user", "hi"), ("assistant", first[name]), ("user", "why?"), ("assistant", second[name])]
    asked = tuple(chat.history["sft"][:3])
    prompt = Prompt(0, asked, chat.tokenizer.prompt_ids(asked))
    alone = generate(chat.roles["sft"], [prompt], chat.sampling, 1)
    assert chat.tokenizer.decode(alone.response_ids_BR[0, : alone.response_lengths_B[0]].tolist()) == second["sft"]


def test_reset_forgets_and_greedy_repeats_itself(chat: Chat) -> None:
    assert chat.obey("/greedy") == "answers are the likeliest from now on"
    first = chat.ask("hi")
    assert chat.ask("hi") != first  # it has heard the first
    assert chat.obey("/reset") == "a new conversation"
    assert chat.ask("hi") == first
    chat.obey("/sample")
    chat.obey("/reset")
    assert chat.ask("hi") != first and not chat.sampling.greedy


def test_an_unknown_command_is_told_what_there_is(chat: Chat) -> None:
    assert chat.obey("/rest") == f"/rest is not known here: {HELP}"


def test_the_history_never_outgrows_the_prompt(chat: Chat) -> None:
    chat.tokenizer = replace(chat.tokenizer, max_prompt=40)
    for _ in range(4):
        chat.ask("why, why, why?")
    assert len(chat.history["policy"]) == 8


def test_questions_come_from_a_pipe_until_quit(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["hi", "", "  why? ", "/quit", "never"])
    monkeypatch.setattr(chat_module.console, "input", lambda _: next(typed))
    assert list(lines()) == ["hi", "why?"]


def test_answers_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show({"base": "\x1b[2J[bold]red[/bold]", "sft": "b", "policy": "c"})
    assert capsys.readouterr().out == "base: [2J[bold]red[/bold]\nSFT: b\npolicy: c\n"


def test_the_one_base_is_shared(chat: Chat) -> None:
    bases = {id(policy.backbone) for policy in chat.roles.values()}
    before = chat.roles["base"].backbone.base_hash()
    chat.ask("hi")
    assert len(bases) == 1 and chat.roles["base"].backbone.base_hash() == before and torch.is_grad_enabled()
