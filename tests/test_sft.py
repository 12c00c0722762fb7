"""Supervised fine-tuning, as people have seen it go wrong: no gradient, no tokens, NaN, nothing trainable."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from taking import pair

from pipeline.backbone import Backbone
from pipeline.batch import Sequences
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.examples import demonstrations, sequences
from pipeline.errors import TrainingError
from pipeline.objectives.offline import sft
from pipeline.objectives.terms import Terms
from pipeline.offline import train_offline
from pipeline.roles import Policy, PolicyOutput
from pipeline.update import Optimizer, ParameterGroup, accumulate, constant_after_warmup

ROWS = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, 2][n % 3 :]) for n in range(6)])


def objective(output: PolicyOutput, rows: Sequences) -> Terms:
    return sft(output.logprobs_BR, rows.response_mask_BR)


def adam(parameters: list[torch.nn.Parameter]) -> Optimizer:
    return Optimizer([ParameterGroup("adapter", parameters, 1e-2)], 1.0, constant_after_warmup(0))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_every_lora_b_gets_a_gradient_at_the_first_step(
    make_backbone: Callable[..., Backbone], family: str, checkpointing: bool, quantization: str
) -> None:
    """Report locuslab/open-unlearning#178: frozen embeddings cut the graph of a re-entrant checkpoint, without an error."""
    backbone = make_backbone(family, perturb=False, quantization=quantization, gradient_checkpointing=checkpointing)
    backbone.train("sft")
    with backbone.training(dropout=True):
        accumulate(Policy(backbone, "sft", 1.0, 16), ROWS, objective, 20)
    grads = {name: weight.grad for name, weight in backbone.causal.named_parameters() if "lora_B" in name}
    layers = {name.split(".lora_B")[0] for name in grads}
    assert len(layers) == len(grads) == backbone.causal.config.num_hidden_layers * {"gpt2": 4}.get(family, 7)
    for name, grad in grads.items():
        assert grad is not None and torch.isfinite(grad).all() and grad.abs().max() > 0, name


def test_a_long_prompt_leaves_the_answer_its_tokens(tiny_folders: Callable[..., Path]) -> None:
    """Report huggingface/trl#6668: prompts and answers are cut apart, so no row is without a token to train on."""
    tokenizer = load_tokenizer(tiny_folders(), max_prompt=40, max_response=1)
    pairs = [pair("where " * 40, "ok"), pair("short", ""), pair("why", "because " * 30)]
    rows, counts = demonstrations(pairs, tokenizer)
    assert rows.prompt_lengths_B.max() == 40
    assert rows.response_lengths_B.tolist() == [1, 1, 1]
    # of the empty answer the end token is left, and it is whole
    assert counts == {"rows": 3, "answers_cut": 2, "trained_tokens": 3}


def test_supervised_tokens_are_counted_and_are_those_of_the_answer(tiny_folders: Callable[..., Path]) -> None:
    """Report marin-community/marin#7237: byte-level ids, so "yes" has three tokens and its end a fourth."""
    tokenizer = load_tokenizer(tiny_folders(), max_prompt=64, max_response=24)
    rows, counts = demonstrations([pair("hi", "yes"), pair("ho", "nono")], tokenizer)
    assert rows.response_mask_BR.sum(1).tolist() == [4, 5]
    assert counts["trained_tokens"] == rows.num_terms == 9
    assert tokenizer.decode_all(rows.response_ids_BR[0, :3].tolist()) == "yes"


def test_a_batch_without_supervised_tokens_is_never_stepped(make_backbone: Callable[..., Backbone]) -> None:
    """Report huggingface/trl#6668: its loss is 0 / 0, which others log as 0."""
    backbone = make_backbone()
    before = backbone.adapter_hash("sft")
    empty = replace(ROWS, response_lengths_B=torch.zeros(len(ROWS), dtype=torch.long))
    with pytest.raises(AssertionError, match="nothing to learn from"):
        train_offline(
            Policy(backbone, "sft", 1.0, 16), [empty], adam(backbone.train("sft")), objective, 20, True, print
        )
    assert backbone.adapter_hash("sft") == before


def test_a_poisoned_batch_is_left_out_and_three_in_a_row_stop_the_stage(
    make_backbone: Callable[..., Backbone],
) -> None:
    """Report MakazhanAlpamys/Soup#532: NaN was stepped into the adapter, and saved with exit code 0."""
    backbone = make_backbone()
    model, optimizer = Policy(backbone, "sft", 1.0, 16), adam(backbone.train("sft"))
    taken: list[dict[str, float]] = []

    def train(batches: list[str]) -> None:
        kinds = iter(batches)

        def poisoned(output: PolicyOutput, rows: Sequences) -> Terms:
            terms = objective(output, rows)
            return replace(terms, loss_sum=terms.loss_sum * float("nan")) if next(kinds) == "bad" else terms

        train_offline(
            model, [ROWS] * len(batches), optimizer, poisoned, 100, True, lambda _, stats: taken.append(stats)
        )

    train(["good", "bad", "good"])
    assert [stats["non_finite_steps"] for stats in taken] == [0, 1, 0]
    assert all(torch.isfinite(tensor).all() for tensor in backbone.adapter_state("sft").values())
    with pytest.raises(TrainingError, match="not finite 3 steps in a row"):
        train(["bad", "bad", "bad"])


def test_a_reloaded_adapter_trains_as_many_weights_as_before(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    """Report huggingface/peft#282: PEFT loads an adapter frozen, and training it then changes nothing."""
    first = make_backbone(perturb=False)
    at_sft = sum(parameter.numel() for parameter in first.train("sft"))
    first.save_adapter("sft", tmp_path)
    backbone = make_backbone(adapters=())
    backbone.load_adapter("policy", tmp_path)
    assert not any(parameter.requires_grad for parameter in backbone.causal.parameters())
    optimizer = adam(backbone.train("policy"))
    trainable = sum(parameter.numel() for parameter in backbone.causal.parameters() if parameter.requires_grad)
    saved = sum(tensor.numel() for tensor in load_file(tmp_path / "adapter_model.safetensors").values())
    assert optimizer.sizes == {"adapter": trainable}
    assert trainable == at_sft == saved > 0
    before = backbone.adapter_hash("policy")
    model = Policy(backbone, "policy", 1.0, 16)
    train_offline(model, [ROWS], optimizer, objective, 100, True, lambda *_: None)
    assert backbone.adapter_hash("policy") != before
