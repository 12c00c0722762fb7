"""Planted faults: each is named by the first beat that it makes deviate; without one, nothing deviates."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diagnosis_world import open_world, write_world

import pipeline.algorithms
import pipeline.evaluation
import pipeline.objectives.online
import pipeline.online
import pipeline.opening
import pipeline.roles
import pipeline.rollout
import pipeline.update
from pipeline.backbone import Backbone
from pipeline.batch import Sequences
from pipeline.diagnosis.beats import check_beats
from pipeline.diagnosis.compare import Beat
from pipeline.diagnosis.opening import Case
from pipeline.heads import ScalarHead
from pipeline.objectives import offline
from pipeline.objectives.kl import IN_REWARD
from pipeline.roles import Policy, RewardModel
from pipeline.tensors import length_mask, safe_exp
from pipeline.update import ParameterGroup

ROWS = 6
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models as small as these a second thread only waits, and on a busy machine for long."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture(scope="module")
def world(tiny_folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, tiny_folders(), tokens__max_response=12, runtime__microbatch_tokens=160)
    return folder


@pytest.fixture
def case(world: Path, monkeypatch: Patch) -> Case:
    monkeypatch.chdir(world)
    return open_world()


def first_deviating(case: Case) -> Beat | None:
    return next((beat for beat in check_beats(case, ROWS) if beat.deviates), None)


# --- faults: what a wrong line in the pipeline would do ---


def kl_sign_flipped(patch: Patch, case: Case) -> None:
    patch.setitem(IN_REWARD, "k1", lambda log_ratio: -log_ratio)


def mask_one_token_short(patch: Patch, case: Case) -> None:
    mask = property(lambda rows: length_mask(rows.response_lengths_B - 1, rows.response_width))
    patch.setattr(Sequences, "response_mask_BR", mask)


def whitening_over_a_mask_one_token_short(patch: Patch, case: Case) -> None:
    real = pipeline.algorithms.masked_whiten
    patch.setattr(pipeline.algorithms, "masked_whiten", lambda x, mask: real(x, mask & mask.roll(-1, 1)) * mask)


def sampled_colder_than_the_logprobs(patch: Patch, case: Case) -> None:
    real = pipeline.rollout.invert_cdf
    patch.setattr(pipeline.rollout, "invert_cdf", lambda p_BV, noise_B: real(p_BV**6, noise_B))


def sampler_at_another_temperature(patch: Patch, case: Case) -> None:
    real = pipeline.rollout.generate_chunk
    patch.setattr(
        pipeline.rollout, "generate_chunk", lambda policy, *rest: real(replace(policy, temperature=0.5), *rest)
    )


def logprobs_at_another_temperature(patch: Patch, case: Case) -> None:
    real = pipeline.roles.token_logprobs
    patch.setattr(
        pipeline.roles,
        "token_logprobs",
        lambda hidden, head, ids, temperature, chunk: real(hidden, head, ids, 0.5 * temperature, chunk),
    )


def goes_on_after_a_stop_token(patch: Patch, case: Case) -> None:
    real = pipeline.rollout.generate_chunk
    patch.setattr(
        pipeline.rollout,
        "generate_chunk",
        lambda policy, asked, sampling, *rest: real(policy, asked, replace(sampling, stop_ids=()), *rest),
    )


def padding_seen_by_the_sampler(patch: Patch, case: Case) -> None:
    real = Backbone.decode
    patch.setattr(
        Backbone, "decode", lambda self, tokens, mask, cache: real(self, tokens, torch.ones_like(mask), cache)
    )


def reward_head_random(patch: Patch, case: Case) -> None:
    case.loop.reward_model.head = ScalarHead(64, std=0.1)


def policy_starts_elsewhere(patch: Patch, case: Case) -> None:
    with torch.no_grad():
        case.loop.policy.backbone.adapter_parameters("policy")[0].add_(1e-3)


def old_logprobs_of_the_wrong_adapter(patch: Patch, case: Case) -> None:
    real = pipeline.evaluation._policy_pass
    patch.setattr(
        pipeline.evaluation, "_policy_pass", lambda policy, batch: real(replace(policy, adapter="sft"), batch)
    )


def reference_is_the_raw_base(patch: Patch, case: Case) -> None:
    case.loop.reference.adapter = None


def values_after_the_token(patch: Patch, case: Case) -> None:
    real = Policy._values
    patch.setattr(Policy, "_values", lambda self, states, mask: real(self, states.roll(-1, 1), mask))


def score_read_one_token_early(patch: Patch, case: Case) -> None:
    def score(self: RewardModel, batch: Sequences) -> torch.Tensor:
        self.backbone.activate(self.adapter)
        hidden_BTH = self.backbone.hidden(batch.tokens_BT, batch.attention_mask_BT)
        return self.head(hidden_BTH[torch.arange(len(batch)), batch.lengths_B - 2])

    patch.setattr(RewardModel, "score", score)


def cut_answers_scored_without_end(patch: Patch, case: Case) -> None:
    patch.setattr(pipeline.batch.Rollout, "ended", lambda rollout, end_id: rollout)


def score_on_the_wrong_token(patch: Patch, case: Case) -> None:
    real = pipeline.evaluation.token_rewards

    def rewards(scores, log_ratio_BR, mask_BR, kl_coef, estimator):
        paid = real(scores, log_ratio_BR, mask_BR, 0.0, estimator).roll(-1, 1)
        return paid + real(torch.zeros_like(scores), log_ratio_BR, mask_BR, kl_coef, estimator)

    patch.setattr(pipeline.evaluation, "token_rewards", rewards)


def penalty_sign_flipped(patch: Patch, case: Case) -> None:
    real = pipeline.evaluation.shaped_scores
    patch.setattr(
        pipeline.evaluation, "shaped_scores", lambda scores, cut, clip, penalty: real(scores, cut, clip, -penalty)
    )


def advantages_not_whitened(patch: Patch, case: Case) -> None:
    patch.setattr(pipeline.algorithms, "masked_whiten", lambda x, mask: x * mask)


def gae_shifted_by_one_token(patch: Patch, case: Case) -> None:
    real = pipeline.algorithms.gae

    def gae(*arguments):
        advantages_BR, returns_BR = real(*arguments)
        return advantages_BR.roll(1, 1), returns_BR

    patch.setattr(pipeline.algorithms, "gae", gae)


def weights_inverted(patch: Patch, case: Case) -> None:
    patch.setattr(pipeline.evaluation, "safe_exp", lambda x: safe_exp(-x))


def rows_mixed_up_in_the_second_epoch(patch: Patch, case: Case) -> None:
    real = pipeline.update._minibatches

    def minibatches(experience, plan, seed):
        for number, minibatch in enumerate(real(experience, plan, seed)):
            mixed = replace(minibatch, advantages_BR=minibatch.advantages_BR.flip(0))
            yield mixed if number >= 2 else minibatch

    patch.setattr(pipeline.update, "_minibatches", minibatches)


def dropout_left_on(patch: Patch, case: Case) -> None:
    for module in case.loop.policy.backbone.causal.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["policy"] = torch.nn.Dropout(0.3)
    real = Backbone.training
    patch.setattr(Backbone, "training", lambda self, dropout: real(self, dropout=True))


def ratio_inverted(patch: Patch, case: Case) -> None:
    patch.setattr(pipeline.objectives.online, "safe_exp", lambda x: safe_exp(-x))


def loss_ignores_the_weights(patch: Patch, case: Case) -> None:
    real = pipeline.objectives.online.clipped_surrogate
    patch.setattr(
        pipeline.objectives.online,
        "clipped_surrogate",
        lambda new, old, advantages, mask, clip, weights, dual: real(new, old, advantages, mask, clip, None, dual),
    )


def clip_forgotten(patch: Patch, case: Case) -> None:
    real = pipeline.objectives.online.clipped_surrogate
    patch.setattr(
        pipeline.objectives.online,
        "clipped_surrogate",
        lambda new, old, advantages, mask, clip, weights, dual: real(new, old, advantages, mask, 1e9, weights, dual),
    )


def value_loss_against_rewards(patch: Patch, case: Case) -> None:
    real = pipeline.objectives.online.clipped_value
    patch.setattr(
        pipeline.objectives.online,
        "clipped_value",
        lambda values, old, returns, mask, clip: real(values, old, returns - returns.roll(-1, 1), mask, clip),
    )


def value_loss_not_weighted(patch: Patch, case: Case) -> None:
    real = pipeline.objectives.online.ppo
    patch.setattr(pipeline.objectives.online, "ppo", lambda policy, value, vf_coef: real(policy, value, 1.0))


def divided_by_answers_not_tokens(patch: Patch, case: Case) -> None:
    patch.setattr(Sequences, "num_terms", property(len))


def no_gradient_below_the_second_layer(patch: Patch, case: Case) -> None:
    block = type(case.loop.policy.backbone.decoder.layers[1])
    real = block.forward
    patch.setattr(block, "forward", lambda self, x, *rest, **named: real(self, x.detach(), *rest, **named))


def gradients_of_micro_batches_not_added_up(patch: Patch, case: Case) -> None:
    real = pipeline.update.microbatches

    def microbatches(batch, tokens):
        for rows, micro in real(batch, tokens):
            for parameter in case.loop.policy.backbone.adapter_parameters("policy"):
                parameter.grad = None
            yield rows, micro

    patch.setattr(pipeline.update, "microbatches", microbatches)


def another_learning_rate(patch: Patch, case: Case) -> None:
    patch.setattr(
        pipeline.online, "ParameterGroup", lambda name, parameters, lr: ParameterGroup(name, parameters, 10 * lr)
    )


def adapter_not_trained(patch: Patch, case: Case) -> None:
    real = Backbone.train

    def train(self: Backbone, name: str) -> list:
        real(self, name)
        return self.adapter_parameters("sft")

    patch.setattr(Backbone, "train", train)


def sft_trained_along(patch: Patch, case: Case) -> None:
    real = pipeline.update.Optimizer.step

    def step(self, loss: float) -> dict[str, float]:
        stats = real(self, loss)
        with torch.no_grad():
            case.loop.policy.backbone.adapter_parameters("sft")[3].add_(1e-6)
        return stats

    patch.setattr(pipeline.update.Optimizer, "step", step)


def sampler_left_behind(patch: Patch, case: Case) -> None:
    real, stale = pipeline.online.generate, []

    def generate(policy, asked, sampling, step):
        if not stale:
            stale.extend(parameter.detach().clone() for parameter in policy.backbone.adapter_parameters("policy"))
        now = [parameter.detach().clone() for parameter in policy.backbone.adapter_parameters("policy")]
        with torch.no_grad():
            for parameter, old in zip(policy.backbone.adapter_parameters("policy"), stale, strict=True):
                parameter.copy_(old)
            rollout = real(policy, asked, sampling, step)
            for parameter, new in zip(policy.backbone.adapter_parameters("policy"), now, strict=True):
                parameter.copy_(new)
        return rollout

    patch.setattr(pipeline.online, "generate", generate)


def pair_loss_prefers_the_rejected(patch: Patch, case: Case) -> None:
    real = offline.bradley_terry
    patch.setattr(offline, "bradley_terry", lambda chosen, rejected, *rest: real(rejected, chosen, *rest))


def value_head_starts_at_random(patch: Patch, case: Case) -> None:
    case.loop.policy.value_head.linear.weight.data += 0.1


FAULTS = {
    pair_loss_prefers_the_rejected: ("before: pair loss", ""),
    value_head_starts_at_random: ("start: adapters and heads", ""),
    policy_starts_elsewhere: ("start: adapters and heads", "must start as a copy"),
    reward_head_random: ("start: adapters and heads", ""),
    goes_on_after_a_stop_token: ("rollout: answers", ""),
    sampler_at_another_temperature: ("rollout: log-probs", ""),
    padding_seen_by_the_sampler: ("rollout: log-probs", ""),
    sampled_colder_than_the_logprobs: ("rollout: draws", "colder"),
    mask_one_token_short: ("evaluate: old log-probs", ""),
    old_logprobs_of_the_wrong_adapter: ("evaluate: old log-probs", "the sft adapter"),
    reference_is_the_raw_base: ("evaluate: reference log-probs", "the raw base"),
    logprobs_at_another_temperature: ("evaluate: reference log-probs", ""),
    values_after_the_token: ("evaluate: values", "AFTER"),
    score_read_one_token_early: ("evaluate: scores", ""),
    cut_answers_scored_without_end: ("evaluate: scores", "without an end token"),
    kl_sign_flipped: ("evaluate: KL per token", "sign flipped"),
    score_on_the_wrong_token: ("evaluate: token rewards", ""),
    penalty_sign_flipped: ("evaluate: token rewards", "penalty with its sign flipped"),
    gae_shifted_by_one_token: ("evaluate: raw advantages", ""),
    advantages_not_whitened: ("evaluate: advantages", "not whitened"),
    whitening_over_a_mask_one_token_short: ("evaluate: advantages", ""),
    weights_inverted: ("evaluate: importance weights", ""),
    rows_mixed_up_in_the_second_epoch: ("update: minibatches", ""),
    dropout_left_on: ("update: log-probs", ""),
    ratio_inverted: ("update: policy loss", ""),
    loss_ignores_the_weights: ("update: policy loss", ""),
    clip_forgotten: ("update: policy loss", ""),
    divided_by_answers_not_tokens: ("update: policy loss", ""),
    value_loss_against_rewards: ("update: value loss", ""),
    value_loss_not_weighted: ("update: loss", ""),
    no_gradient_below_the_second_layer: ("update: gradients", "no gradient reaches"),
    gradients_of_micro_batches_not_added_up: ("update: gradients", ""),
    another_learning_rate: ("update: optimizer step", ""),
    adapter_not_trained: ("update: optimizer step", "not trained"),
    sft_trained_along: ("update: what is frozen", ""),
    sampler_left_behind: ("sync: log-probs of the next rollout", ""),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_by_its_beat(fault: Callable, case: Case, monkeypatch: Patch) -> None:
    """Reports huggingface/trl#1340, #3750, #3500 and OpenRLHF/OpenRLHF#853 are among them."""
    fault(monkeypatch, case)
    beat = first_deviating(case)
    name, hint = FAULTS[fault]
    assert beat is not None and beat.name == name, beat
    assert hint in beat.hint, beat


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ppo__algorithm": "reinforce", "ppo__gamma": 0.9},
        {"ppo__algorithm": "rloo", "ppo__dual_clip": 3.0},
        {"ppo__algorithm": "grpo", "ppo__temperature": 0.7},
        {"ppo__old_logprobs": "rollout", "ppo__kl_estimator": "k3", "ppo__value_backprop": "detached"},
        {"ppo__kl_target": 3.0, "ppo__normalize_scores": True},
        {"base__quantization": "nf4"},
        {"base__quantization": "nf4", "base__dtype": "bfloat16"},
    ],
    ids=str,
)
def test_without_a_fault_nothing_deviates(
    settings: dict, tiny_folders: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    write_world(tmp_path, tiny_folders(), tokens__max_response=12, **settings)
    monkeypatch.chdir(tmp_path)
    assert first_deviating(open_world()) is None


def test_gpt2_with_other_rewards_and_demonstrations_beside(
    tiny_folders: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Terms that are no model, and a family with absolute positions and transposed layers."""
    terms = [
        {"term": "reward_model", "weight": 0.5},
        {"term": "length_penalty", "weight": 0.1, "target": 3},
        {"term": "repetition_penalty", "weight": 2.0, "ngram": 2},
    ]
    write_world(tmp_path, tiny_folders("gpt2"), tokens__max_response=12, ppo__reward=terms, ppo__ptx_coef=0.5)
    monkeypatch.chdir(tmp_path)
    assert first_deviating(open_world()) is None
