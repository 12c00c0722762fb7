"""FSDP over gloo: two processes that hold the base together do what one does that has it whole; in 32 bits and in NF4."""

import gc
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import backbone_in
from several import in_processes
from test_several_processes import CLOSE, ROWS, TOKENS, offline_step, online_step, online_world, sampled, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from worlds import SAMPLING, blocks

from pipeline import processes, ranks
from pipeline.algorithms import algorithm_of
from pipeline.batch import Rollout
from pipeline.data.examples import epochs_of
from pipeline.evaluation import evaluate
from pipeline.objectives.offline import sft
from pipeline.offline import train_offline
from pipeline.quantization import FrozenLinear4bit
from pipeline.randomness import RandomStates
from pipeline.recovery import OfEach, Recovery
from pipeline.roles import Policy
from pipeline.rollout import generate
from pipeline.sharding import whole
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth

KINDS = ("none", "nf4")
WHATS = ("sft", "reward", "ppo")


def steps(folder: Path, rollout: Rollout, **keys: Any) -> dict[str, dict[str, Any]]:
    """An update of each kind, and samples."""
    return (
        {stage: offline_step(folder, stage, **keys) for stage in ("sft", "reward")}
        | {"ppo": online_step(folder, "ppo", rollout, **keys)}
        | {"samples": sampled(folder, **keys)}
    )


def held(layers: nn.Module) -> int:
    """Bytes of the blocks' frozen weights in this process."""
    frozen = [parameter for key, parameter in layers.named_parameters() if ".lora_" not in key]
    mine = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in frozen]
    return sum(weight.numel() * weight.itemsize for weight in mine)


def moments(folder: Path, **keys: Any) -> dict[str, int]:
    """How many numbers Adam keeps here after a step, and how many parameters it trains."""
    backbone = backbone_in(folder, **keys)
    optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 1e-2)], 1.0, cosine_to_tenth(1, 0.0))
    train(Policy(backbone, "sft", 1.0, 16), optimizer)
    kept = [state["exp_avg"].numel() for state in optimizer._own.state_dict()["state"].values()]
    return {"moments": sum(kept), "trained": sum(parameter.numel() for parameter in optimizer.parameters)}


def train(model: Policy, optimizer: Optimizer, *recovery: Recovery) -> None:
    """Two epochs of seven rows in batches of three: six steps, with dropout where the adapter has it."""
    train_offline(
        model, epochs_of(ROWS, 3, 2, 4), optimizer,
        lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR),
        TOKENS, True, lambda *_: None, *recovery,
    )  # fmt: skip


def passes(folder: Path, rollout: Rollout, **keys: Any) -> dict[str, Any]:
    """What the passes of reference and reward model leave behind, and where the base is before, in and after sampling."""
    world = online_world(folder, "ppo", **keys)
    layers = blocks(world.backbone)
    grads: list[bool] = []

    def graded(_: nn.Module, __: Any, output: Any) -> None:
        grads.append(torch.is_grad_enabled() or output.last_hidden_state.requires_grad)

    def score(rollout: Rollout) -> Tensor:
        return world.reward_model.score_minibatches(rollout, 2, TOKENS, 3)

    before = held(layers)
    hook = world.backbone.decoder.register_forward_hook(graded)
    evaluate(rollout, world.policy, world.reference, score, algorithm_of(world.cfg), world.cfg, TOKENS)
    hook.remove()
    caches = []

    def cached(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        caches.append(weakref.ref(given["cache"]))

    world.backbone.decoder.register_forward_pre_hook(cached, with_kwargs=True)
    generate(world.policy, world.prompts, replace(SAMPLING, decoder="transformers", chunk=2), step=0)
    gc.collect()
    after = held(layers)
    with whole(world.backbone.decoder):
        inside = held(layers)
    return {
        "grads": grads,
        "adapter_grads": [key for key, value in world.backbone.causal.named_parameters() if value.grad is not None],
        "caches": len({id(cache) for cache in caches}),
        "caches_alive": sum(cache() is not None for cache in caches),
        "held": {"before": before, "after": after, "inside": inside},
    }


def resumed(folder: Path, scratch: Path, **keys: Any) -> list[list[Tensor]]:
    """Weights after six steps, and after the last three of them in a world that goes on from the checkpoint."""
    found = []
    for _ in range(2):
        torch.manual_seed(processes.rank())
        backbone = backbone_in(folder, **keys)
        optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 1e-2)], 1.0, cosine_to_tenth(6, 0.2))
        recovery = Recovery("test", scratch / "checkpoints", 3, 1e9, {}, lambda: None)
        train(Policy(backbone, "sft", 1.0, 16), optimizer, recovery.hold(random=OfEach(RandomStates())))
        found.append(weights(optimizer.parameters))
        if processes.is_main():
            shutil.rmtree(scratch / "checkpoints/step-000006")
        ranks.exchange(None)
    return found


def same_bits(folder: Path, dtype: str) -> list[bool]:
    """Whether each layer's weight, put together again, is dequantised to what it was; some 16 bits are no number, and may not change."""
    backbone = backbone_in(folder, quantization="nf4", dtype=dtype, launch="fsdp")
    layers = [layer for layer in backbone.causal.modules() if isinstance(layer, FrozenLinear4bit)]
    before = [layer.dequantized() for layer in layers]
    backbone.train("sft")
    divided = all(isinstance(layer.weight, DTensor) for layer in layers)
    Policy(backbone, "sft", 1.0, 16).logprobs_all(ROWS, TOKENS)
    with whole(backbone.decoder):
        return [
            divided and torch.equal(layer.dequantized(), weight) for layer, weight in zip(layers, before, strict=True)
        ]


def everything(folder: Path, rollout: Rollout, scratch: Path) -> dict[str, dict[str, Any]]:
    ranks.keep_step()
    made = {kind: steps(folder, rollout, quantization=kind, launch="fsdp") for kind in KINDS}
    sharded = {"launch": "fsdp"}
    return made | {
        "moments": moments(folder, **sharded),
        "passes": passes(folder, rollout, **sharded),
        "resumed": resumed(folder, scratch, **sharded),
        "same_bits": {dtype: same_bits(folder, dtype) for dtype in ("float32", "bfloat16")},
    }


@pytest.fixture(scope="module")
def made(tiny_folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict]]:
    """What one process has without FSDP, and what each of two has with it."""
    folder, scratch = tiny_folders(), tmp_path_factory.mktemp("fsdp")
    rollout = sampled(folder)["rollout"]
    alone = {kind: steps(folder, rollout, quantization=kind) for kind in KINDS}
    return alone, in_processes(2, scratch, everything, folder, rollout, scratch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", WHATS)
def test_two_processes_that_hold_the_base_together_move_the_adapters_as_one_does(
    made: tuple[dict, list[dict]], kind: str, what: str
) -> None:
    alone, (first, second) = made
    for one, mine, other in zip(*(found[kind][what]["weights"] for found in (alone, first, second)), strict=True):
        assert float((one - mine).abs().max()) < CLOSE
        assert torch.equal(mine, other), "the processes have parted ways"


@pytest.mark.parametrize("kind", KINDS)
def test_they_draw_the_same_samples(made: tuple[dict, list[dict]], kind: str) -> None:
    alone, both = made
    for found in both:
        assert torch.equal(found[kind]["samples"]["rollout"].tokens_BT, alone[kind]["samples"]["rollout"].tokens_BT)


def test_optimizer_state_is_sharded(made: tuple[dict, list[dict]]) -> None:
    first, second = (found["moments"] for found in made[1])
    assert first["moments"] + second["moments"] == first["trained"] == second["trained"]
    assert max(first["moments"], second["moments"]) < 0.6 * first["trained"]


def test_reference_and_reward_passes_have_no_gradients(made: tuple[dict, list[dict]]) -> None:
    for found in (found["passes"] for found in made[1]):
        assert len(found["grads"]) >= 9, "three minibatches by policy, reference and reward model"
        assert not any(found["grads"])
        assert found["adapter_grads"] == []


def test_kv_cache_is_released_after_the_rollout(made: tuple[dict, list[dict]]) -> None:
    for found in (found["passes"] for found in made[1]):
        assert found["caches"] >= 2, "a cache for each chunk"
        assert found["caches_alive"] == 0


def test_each_process_holds_half_of_the_blocks_but_for_sampling(made: tuple[dict, list[dict]]) -> None:
    for held in (found["passes"]["held"] for found in made[1]):
        assert held["before"] == held["after"] == held["inside"] / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_weights_come_back_bit_for_bit(made: tuple[dict, list[dict]], dtype: str) -> None:
    """bitsandbytes-foundation/bitsandbytes#1945, huggingface/accelerate#3983."""
    for found in (found["same_bits"][dtype] for found in made[1]):
        assert len(found) == 14 and all(found)


def test_resumed_it_ends_with_the_same_bits(made: tuple[dict, list[dict]]) -> None:
    for straight, again in (found["resumed"] for found in made[1]):
        assert all(torch.equal(one, other) for one, other in zip(straight, again, strict=True))
