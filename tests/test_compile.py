"""Compiled blocks: the same numbers up to rounding, whatever adapter, mode and length; skipped where there is no C++ compiler."""

import shutil
from collections.abc import Callable

import pytest
import torch
from worlds import World, flat, ppo_params, relative_distance

from pipeline.backbone import Backbone
from pipeline.errors import BaseModelError

compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler on CPU"
)


@compiler
@pytest.mark.parametrize(("quantization", "checkpointing"), [("none", True), ("nf4", False)])
def test_compiled_blocks_give_the_same_numbers(
    make_backbone: Callable[..., Backbone], quantization: str, checkpointing: bool
) -> None:
    """Sampling with a cache, policy, reference and reward passes, and gradients; adapters switched between."""
    torch._dynamo.reset()
    found = {}
    for compile in ("off", "layers"):
        world = World(
            make_backbone,
            ppo_params(minibatch_size=8),
            quantization=quantization,
            gradient_checkpointing=checkpointing,
            compile=compile,
        )
        compiled = [module for module in world.backbone.causal.modules() if module._compiled_call_impl is not None]
        assert len(compiled) == (2 if compile == "layers" else 0)
        experience = world.experience(8)
        assert torch.equal(experience.old_logprobs_BR, experience.ref_logprobs_BR)
        scores_B = world.reward_model.score_all(experience, 1000)
        found[compile] = (
            experience.tokens_BT,
            experience.old_logprobs_BR,
            scores_B,
            flat(world.gradients(experience, 8)),
        )
    plain, compiled = found["off"], found["layers"]
    assert torch.equal(plain[0], compiled[0])
    torch.testing.assert_close(compiled[1], plain[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled[2], plain[2], rtol=0, atol=1e-5)
    assert relative_distance(compiled[3], plain[3]) < 1e-5


def test_compiling_weights_that_are_dequantised_each_time_is_refused(make_backbone: Callable[..., Backbone]) -> None:
    with pytest.raises(BaseModelError, match=r"runtime.compile is layers but .* set runtime.base_cache to on"):
        make_backbone(quantization="nf4", base_cache="off", compile="layers")
