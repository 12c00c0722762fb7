"""Sampling: pure, keyed, and right about where an answer ends."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import FAMILIES, blocks

from pipeline.backbone import Backbone
from pipeline.data.examples import Prompt, sequences
from pipeline.randomness import uniforms
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate, invert_cdf

PROMPTS = [Prompt(key, (), [5 + (key * 7 + place) % 200 for place in range(3 + 2 * key)]) for key in range(7)]
SAMPLING = Sampling(max_new_tokens=12, stop_ids=(2,), chunk=64, seed=3)


def policy_of(backbone: Backbone, temperature: float = 1.0) -> Policy:
    return Policy(backbone, "sft", temperature, logprob_chunk=16)


def test_inverse_cdf_by_hand() -> None:
    """p = (0.25, 0, 0.75): numbers below 0.25 give token 0, all others token 2, never token 1."""
    chosen = invert_cdf(
        torch.tensor([[0.25, 0.0, 0.75]] * 4), torch.tensor([0.0, 0.2499, 0.25, 0.9999], dtype=torch.float64)
    )
    assert chosen.tolist() == [0, 0, 2, 2]


def test_inverse_cdf_equals_a_running_sum_over_blocks() -> None:
    """1,000 tokens in four blocks, a third of them impossible, against a loop over the vocabulary."""
    probabilities_BV = torch.rand(8, 1000) * (torch.rand(8, 1000) > 0.33)
    probabilities_BV /= probabilities_BV.sum(1, keepdim=True)
    numbers = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 2**-53], dtype=torch.float64)
    expected = []
    for row, number in zip(probabilities_BV.double().tolist(), numbers.tolist(), strict=True):
        target, running, token = number * sum(row), 0.0, None
        for candidate, probability in enumerate(row):
            running += probability
            if probability > 0:
                token = candidate
                if running > target:
                    break
        expected.append(token)
    assert invert_cdf(probabilities_BV, numbers).tolist() == expected


def test_noise_is_uniform_and_keyed() -> None:
    noise = uniforms(1, 2, [(key, 0) for key in range(20_000)], 3)
    assert float(noise.min()) >= 0 and float(noise.max()) < 1
    # mean and variance of the uniform distribution, to five standard errors: 5 / sqrt(12 * 20000), 5 / sqrt(180 * 20000)
    assert abs(float(noise.mean()) - 1 / 2) < 0.0103
    assert abs(float(noise.var()) - 1 / 12) < 0.0027
    first = uniforms(1, 2, [(7, 0)], 3)
    assert torch.equal(uniforms(1, 2, [(6, 0), (7, 0)], 3)[1:], first)
    others = [
        uniforms(0, 2, [(7, 0)], 3),
        uniforms(1, 1, [(7, 0)], 3),
        uniforms(1, 2, [(7, 1)], 3),
        uniforms(1, 2, [(7, 0)], 4),
    ]
    assert len({float(number) for number in (first, *others)}) == 5


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    "stops", [(2,), tuple(range(0, 320, 20))], ids=["all run to the limit", "rows leave the batch"]
)
def test_chunks_and_compaction_change_no_sample(
    make_backbone: Callable[..., Backbone], chunk: int, stops: tuple[int, ...]
) -> None:
    policy = policy_of(make_backbone())
    sampling = replace(SAMPLING, stop_ids=stops)
    together = generate(policy, PROMPTS, sampling, step=1)
    apart = generate(policy, PROMPTS, replace(sampling, chunk=chunk), step=1)
    assert torch.equal(together.tokens_BT, apart.tokens_BT)
    torch.testing.assert_close(together.behaviour_logprobs_BR, apart.behaviour_logprobs_BR, rtol=0, atol=1e-5)


def test_steps_draw_other_noise(make_backbone: Callable[..., Backbone]) -> None:
    policy = policy_of(make_backbone())
    assert not torch.equal(
        generate(policy, PROMPTS, SAMPLING, 0).tokens_BT, generate(policy, PROMPTS, SAMPLING, 1).tokens_BT
    )


def test_answers_end_at_the_first_stop_token_or_are_truncated(make_backbone: Callable[..., Backbone]) -> None:
    """Reports hiyouga/LLaMA-Factory#803 and huggingface/trl#3750: the stop token belongs to the answer."""
    stops = tuple(range(0, 320, 20))
    rollout = generate(policy_of(make_backbone()), PROMPTS, replace(SAMPLING, stop_ids=stops), step=0)
    for row in range(len(rollout)):
        ids = rollout.response_ids_BR[row, : rollout.response_lengths_B[row]].tolist()
        assert not set(ids[:-1]) & set(stops)
        assert (ids[-1] in stops) != bool(rollout.truncated_B[row])
        assert len(ids) == 12 or ids[-1] in stops
    assert 1 <= int(rollout.response_lengths_B.min()) < 12


def test_a_stop_token_alone_is_an_answer_of_length_1(make_backbone: Callable[..., Backbone]) -> None:
    rollout = generate(policy_of(make_backbone()), PROMPTS, replace(SAMPLING, stop_ids=tuple(range(320))), step=0)
    assert rollout.response_lengths_B.tolist() == [1] * 7
    assert not rollout.truncated_B.any()
    assert rollout.num_terms == 7


def test_a_stop_token_at_the_limit_is_no_truncation(make_backbone: Callable[..., Backbone]) -> None:
    policy = policy_of(make_backbone())
    once = generate(policy, PROMPTS[:1], SAMPLING, step=0)
    last = int(once.response_ids_BR[0, -1])
    limit = once.response_ids_BR[0].tolist().index(last) + 1
    again = generate(policy, PROMPTS[:1], replace(SAMPLING, max_new_tokens=limit, stop_ids=(last,)), step=0)
    assert (int(again.response_lengths_B[0]), bool(again.truncated_B[0])) == (limit, False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_logprobs_are_those_of_a_plain_forward(
    make_backbone: Callable[..., Backbone], family: str, temperature: float
) -> None:
    """Reports huggingface/trl#2358 and OpenRLHF/OpenRLHF#853: the whole distribution, at the temperature, as tokens were sampled."""
    policy = policy_of(make_backbone(family), temperature)
    rollout = generate(policy, PROMPTS, SAMPLING, step=0)
    with policy.backbone.inference():
        recomputed_BR = policy(rollout).logprobs_BR
    torch.testing.assert_close(rollout.behaviour_logprobs_BR, recomputed_BR, rtol=0, atol=1e-4)


def test_samples_follow_the_distribution(make_backbone: Callable[..., Backbone]) -> None:
    """4,000 first tokens of one prompt against the softmax of its logits: chi-square over tokens expected at least 5 times."""
    policy = policy_of(make_backbone())
    asked = [replace(PROMPTS[2], key=key) for key in range(4000)]
    tokens = generate(policy, asked, replace(SAMPLING, max_new_tokens=1, chunk=500), step=0).response_ids_BR[:, 0]
    with policy.backbone.inference():
        ids_BT = torch.tensor([PROMPTS[2].ids])
        hidden_BTH = policy.backbone.hidden(ids_BT, torch.ones_like(ids_BT).bool())
        expected = torch.softmax(hidden_BTH[0, -1] @ policy.backbone.head_VH.T, -1) * 4000
    seen = torch.bincount(tokens, minlength=len(expected)).float()
    frequent = expected >= 5
    statistic = float(((seen - expected) ** 2 / expected)[frequent].sum())
    degrees = int(frequent.sum()) - 1
    assert degrees > 20
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5  # five standard deviations of chi-square


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_in_the_midst_of_checkpointed_training(
    make_backbone: Callable[..., Backbone], tmp_path: Path, family: str, quantization: str
) -> None:
    """Reports huggingface/trl#1066 and jsboige/CoursIA#12720.

    The cache is on (one new column per token) and checkpointing and gradients are off; after it all are as they were, and
    the greedy text is that of a model loaded afresh, and of transformers.
    """
    keys = {"family": family, "quantization": quantization}
    backbone = make_backbone(gradient_checkpointing=True, **keys)
    policy = policy_of(backbone)
    optimizer = torch.optim.SGD(backbone.train("sft"), lr=0.1)
    passes: list[tuple[int, bool, bool]] = []

    def note(_, args: tuple[torch.Tensor]) -> None:
        passes.append((args[0].shape[1], blocks(backbone)[0].training, torch.is_grad_enabled()))

    with backbone.training(dropout=False):
        policy(sequences([([5, 6, 7], [8, 9, 2])])).logprobs_BR.sum().backward()
        optimizer.step()
        modes = [module.training for module in backbone.causal.modules()]
        with backbone.causal.get_input_embeddings().register_forward_pre_hook(note):
            rollout = generate(policy, PROMPTS[:1], replace(SAMPLING, greedy=True), step=0)
        assert [module.training for module in backbone.causal.modules()] == modes
        assert backbone.causal.training and torch.is_grad_enabled()
    assert passes == [(3, False, False)] + [(1, False, False)] * (len(rollout.response_ids_BR[0]) - 1)

    backbone.save_adapter("sft", tmp_path)
    fresh = make_backbone(adapters=(), **keys)
    fresh.load_adapter("sft", tmp_path)
    again = generate(policy_of(fresh), PROMPTS[:1], replace(SAMPLING, greedy=True), step=0)
    assert rollout.tokens_BT.tolist() == again.tokens_BT.tolist()
    ids_BT = torch.tensor([PROMPTS[0].ids])
    theirs = fresh.causal.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=12)
    assert rollout.tokens_BT.tolist() == theirs.tolist()
