"""Gradients that no micro-batch size, checkpointing or rollout may change, on every family, precision and quantisation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import LORA
from worlds import (
    BASES,
    DEMO_PPO,
    FAMILIES,
    LINEARS,
    SETTINGS,
    TO_THE_LIMIT,
    Setting,
    World,
    blocks,
    flat,
    lengths_B,
    ppo_params,
    relative_distance,
)

import pipeline.blocks
from pipeline.attention import attend_rotated
from pipeline.backbone import Backbone
from pipeline.batch import Rollout
from pipeline.objectives.kl import k3
from pipeline.quantization import FrozenLinear4bit

# In bfloat16 each micro-batch's gradient is summed from activations of 8 bits.
TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3}
DROPOUT = LORA.model_copy(update={"dropout": 0.5})  # where it were on, nothing would be equal


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_microbatches_of_1_3_and_8_give_the_same_sum(make_backbone: Callable[..., Backbone], setting: Setting) -> None:
    """PPO's whole loss, policy and value, on eight rows of 4 to 34 tokens; and every matrix of the adapter gets a gradient."""
    world = World(make_backbone, lora=DROPOUT, **setting.keys)
    experience = world.experience(8)
    torch.nn.init.normal_(world.value_head.linear.weight, std=0.1)
    whole = world.gradients(experience, 8)
    assert len(whole) == 2 * LINEARS[setting.family] + 2
    assert all(float(gradient.abs().max()) > 0 for gradient in whole)
    for microbatch_rows in (1, 3):
        parts = world.gradients(experience, microbatch_rows)
        assert relative_distance(flat(parts), flat(whole)) < TOLERANCE[setting.dtype]


@contextlib.contextmanager
def forwards_counted(monkeypatch: pytest.MonkeyPatch, backbone: Backbone, calls: list[int]) -> Iterator[None]:
    """The number of a block joins the list at each of its forwards: by the first module that it calls, in ours by its attention."""

    def counted(attention: torch.nn.Module, *rest: Any, **more: Any) -> torch.Tensor:
        calls.append(attention.layer_idx)
        return attend_rotated(attention, *rest, **more)

    hooks = [
        next(block.children()).register_forward_pre_hook(lambda *_, number=number: calls.append(number))
        for number, block in enumerate(blocks(backbone))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.blocks, "attend_rotated", counted)
        yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("setting", BASES, ids=str)
def test_gradient_checkpointing_runs_and_changes_no_gradient(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    """Reports huggingface/trl#1066 and locuslab/open-unlearning#178: bit for bit, each block forward twice and not once."""
    gradients, forwards = {}, {}
    for checkpointing in (False, True):
        keys = setting.keys | {"gradient_checkpointing": checkpointing}
        world = World(make_backbone, lora=DROPOUT, **keys)
        experience = world.experience(8)
        calls: list[int] = []
        with forwards_counted(monkeypatch, world.backbone, calls):
            gradients[checkpointing] = flat(world.gradients(experience, 8))
        forwards[checkpointing] = calls
    assert torch.equal(gradients[True], gradients[False])
    assert forwards == {False: [0, 1], True: [0, 1, 1, 0]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_leaves_packed_weights_and_gradients_as_they_were(
    make_backbone: Callable[..., Backbone], family: str, dtype: str
) -> None:
    """Rule 6.2: bitsandbytes' own forward repacks weights in an eval pass, and later no gradient goes below that layer."""
    setting = Setting(family, dtype, "nf4", checkpointing=True)
    experience = World(make_backbone, **setting.keys).experience(8)
    untouched = World(make_backbone, **setting.keys).gradients(experience, 8)
    world = World(make_backbone, **setting.keys)
    layers = [module for module in world.backbone.causal.modules() if isinstance(module, FrozenLinear4bit)]
    packed = [layer.weight.data.clone() for layer in layers]
    world.experience(8)
    world.reward_model.score_all(experience, 1000)
    after = world.gradients(experience, 8)
    assert len(layers) == LINEARS[family]
    assert all(torch.equal(layer.weight.data, before) for layer, before in zip(layers, packed, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(after, untouched, strict=True))
    first_block = after[: LINEARS[family]]  # A and B of half of the linears
    assert all(float(gradient.abs().max()) > 0 for gradient in first_block)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_head_of_zeros_sends_no_gradient_into_the_shared_backbone(
    make_backbone: Callable[..., Backbone], family: str
) -> None:
    """Report microsoft/DeepSpeedExamples#556: scores around 20, and the first step moves the policy as if there were no critic."""

    def about_20(rollout: Rollout) -> torch.Tensor:
        return 18 + lengths_B(rollout) / 2

    adapters = {}
    for vf_coef in (0.5, 0.0):
        world = World(make_backbone, ppo_params(vf_coef=vf_coef, score_clip=100.0), score=about_20, family=family)
        gradients = world.gradients(world.experience(8), 8)
        adapters[vf_coef] = flat(gradients[:-2])
        assert bool(gradients[-1].abs() > 1) == (vf_coef > 0)  # the head itself learns from the first step on
    assert torch.equal(adapters[0.5], adapters[0.0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_update_with_a_new_critic_leaves_the_policy_near(
    make_backbone: Callable[..., Backbone], family: str
) -> None:
    """Report microsoft/DeepSpeedExamples#556: large errors of a new critic, two epochs, and the policy's KL stays below stop_kl."""
    world = World(
        make_backbone,
        ppo_params(stop_kl=None, score_clip=100.0),
        lr=1e-3,
        score=lambda rollout: 20.0 + lengths_B(rollout),
        sampling=TO_THE_LIMIT,
        family=family,
    )
    stats = world.update(world.experience(8), 8)
    assert stats["value_loss"] > 100 and stats["update_steps"] == 4
    rollout = world.rollout()
    log_ratio_BR = world.policy.logprobs_all(rollout, 1000) - world.reference.logprobs_all(rollout, 1000)
    assert 0 < float(k3(log_ratio_BR).mean()) < DEMO_PPO["stop_kl"]
