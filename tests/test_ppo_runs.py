"""Whole runs of a few iterations: what may move, what may not, what stays in memory, and the smallest cases."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import (
    BASES,
    FAMILIES,
    LINEARS,
    PROMPTS,
    SAMPLING,
    TO_THE_LIMIT,
    Setting,
    World,
    ppo_params,
)

from pipeline.backbone import Backbone
from pipeline.batch import Experience

VOCABULARY = 320  # of the tiny models; no other axis of theirs is as wide


def hashes_of_what_is_frozen(world: World) -> dict[str, str]:
    adapters = {name: world.backbone.adapter_hash(name) for name in ("sft", "reward")}
    return {"base": world.backbone.base_hash(), **adapters}


@pytest.mark.parametrize("setting", BASES, ids=str)
def test_what_is_frozen_does_not_move_and_every_b_does(
    make_backbone: Callable[..., Backbone], setting: Setting
) -> None:
    """Report huggingface/trl#1340: base, reference and reward model by hash, with the reward model as the score. Checkpointing on."""
    setting = replace(setting, checkpointing=True)
    world = World(make_backbone, **setting.keys)
    world.score = world.reward_model.score
    frozen = hashes_of_what_is_frozen(world)
    before = {key: tensor.clone() for key, tensor in world.backbone.adapter_state("policy").items()}
    world.train(2)
    after = world.backbone.adapter_state("policy")
    assert hashes_of_what_is_frozen(world) == frozen
    assert len(after) == 2 * LINEARS[setting.family]
    assert [key for key in after if torch.equal(after[key], before[key])] == []
    assert float(world.value_head.linear.weight.detach().abs().max()) > 0


@pytest.mark.parametrize("algorithm", ["reinforce", "rloo", "grpo"])
def test_the_same_without_a_critic(make_backbone: Callable[..., Backbone], algorithm: str) -> None:
    cfg = ppo_params(algorithm=algorithm, group_size=2)
    world = World(make_backbone, cfg, prompts=PROMPTS[: cfg.prompts_per_iteration], quantization="nf4")
    frozen = hashes_of_what_is_frozen(world)
    before = {key: tensor.clone() for key, tensor in world.backbone.adapter_state("policy").items()}
    world.train(2)
    after = world.backbone.adapter_state("policy")
    assert hashes_of_what_is_frozen(world) == frozen
    assert [key for key in after if torch.equal(after[key], before[key])] == []


# --- memory ---


def bytes_in_tensors() -> int:
    """Of every tensor that Python can reach, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)):
        # tests of compiled blocks leave stand-ins for tensors behind, which have no memory and refuse to say where it is
        with contextlib.suppress(RuntimeError):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gpt2", True), ("qwen2", False)], ids=str)
def test_memory_after_step_3_is_that_after_step_10(
    make_backbone: Callable[..., Backbone], family: str, checkpointing: bool
) -> None:
    """Report huggingface/trl#234. All answers have ten tokens, so that the experience of each step is as large."""
    world = World(
        make_backbone,
        ppo_params(epochs=1, minibatch_size=8),
        sampling=TO_THE_LIMIT,
        microbatch_rows=4,
        family=family,
        gradient_checkpointing=checkpointing,
    )
    kept: list[dict[str, float]] = []
    held: dict[int, int] = {}

    def watch(done: int) -> None:
        if done in (3, 10):
            held[done] = bytes_in_tensors()

    world.train(10, lambda _, stats, __: kept.append(stats), watch)
    assert held[10] == held[3] > 100_000
    assert {type(value) for stats in kept for value in stats.values()} == {float}


class WidestLogits(TorchDispatchMode):
    """Notes how many rows of the vocabulary the largest tensor has that any operation makes, backward passes included.

    The output matrix itself, which is as wide when it is transposed, does not count.
    """

    def __init__(self, head_VH: torch.Tensor) -> None:
        super().__init__()
        self.head = head_VH.untyped_storage().data_ptr()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            wide = isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY
            if wide and tensor.untyped_storage().data_ptr() != self.head:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return made


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_chunk_exist_and_never_those_of_a_rollout(
    make_backbone: Callable[..., Backbone], family: str
) -> None:
    """Report huggingface/trl#234: 80 tokens, chunks of 16; scoring and update alike."""
    world = World(make_backbone, sampling=TO_THE_LIMIT, family=family)
    rollout = world.rollout()
    assert rollout.num_terms == 80
    with WidestLogits(world.backbone.head_VH) as scoring:
        experience = world.evaluate(rollout, 8)
    with WidestLogits(world.backbone.head_VH) as updating:
        world.update(experience, 8)
    assert scoring.rows == updating.rows == 16


# --- the smallest cases ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_answer_of_one_token(make_backbone: Callable[..., Backbone], family: str, dtype: str) -> None:
    """Report huggingface/trl#4662: no spread to divide by; whitening gives 0, the critic learns, and nothing is NaN."""
    figures: list[dict[str, float]] = []
    world = World(
        make_backbone,
        ppo_params(rollout_size=1, minibatch_size=1),
        prompts=PROMPTS[:1],
        sampling=replace(SAMPLING, max_new_tokens=1),
        family=family,
        dtype=dtype,
    )
    world.train(3, lambda _, stats, __: figures.append(stats))
    assert all(torch.isfinite(torch.tensor(list(stats.values()))).all() for stats in figures)
    assert [stats["policy_loss"] for stats in figures] == [0, 0, 0]
    assert figures[0]["advantages_without_spread"] == 1
    assert float(world.value_head.linear.weight.detach().abs().max()) > 0
    assert all(torch.isfinite(tensor).all() for tensor in world.backbone.adapter_state("policy").values())


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_the_end_token_alone_are_scored_and_trained_on(
    make_backbone: Callable[..., Backbone], family: str
) -> None:
    """Report hiyouga/LLaMA-Factory#803: every token ends the answer, token 2 is pad and end in one."""
    seen: list[tuple[dict[str, float], Experience]] = []
    world = World(
        make_backbone,
        ppo_params(kl_coef=0.1),
        score=lambda rollout: rollout.response_ids_BR[:, 0].float() / VOCABULARY,
        sampling=replace(SAMPLING, stop_ids=tuple(range(VOCABULARY))),
        family=family,
    )
    before = world.backbone.adapter_hash("policy")
    world.train(3, lambda _, stats, experience: seen.append((stats, experience)))
    for stats, experience in seen:
        assert experience.response_lengths_B.tolist() == [1] * 8
        assert (stats["length_mean"], stats["length_p90"], stats["end_token_rate"]) == (1, 1, 1)
        kl_B = (experience.old_logprobs_BR - experience.ref_logprobs_BR)[:, 0]
        expected_B = experience.scores_B - 0.1 * kl_B
        torch.testing.assert_close(experience.rewards_BR[:, 0], expected_B, rtol=0, atol=1e-6)
    assert world.backbone.adapter_hash("policy") != before
