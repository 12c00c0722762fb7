"""What lies in memory in each stage, and what its passes add; they come one after another."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from math import ceil

import torch
from transformers import PretrainedConfig

from pipeline.algorithms import algorithm_of
from pipeline.batch import Experience
from pipeline.heads import ScalarHead
from pipeline.loading import attention_of
from pipeline.planning.live import META, size_of
from pipeline.planning.passes import (
    Rows,
    observation,
    pair_loss,
    policy_loss,
    sampling_first,
    sampling_last,
    score,
    scoring,
    training,
)
from pipeline.planning.settings import Machine, Settings
from pipeline.planning.skeleton import BaseShape, PlannedBackbone, build, frozen_sizes
from pipeline.quantization import keeps_cache
from pipeline.sampling_linears import can_pack

Sizes = dict[str, int]
FLOAT32 = 4  # bytes
# What glibc's heap holds for the tensors of a pass beyond their bytes: it leaves a hole where one was, and the next of the
# same size does not fit (glibc's bug 14581, mended in 2.38). As benchmarks/memory.py measured it with 2.36.
HEAP_HOLES = 0.5
SAMPLING = ("sampling, first token", "sampling, last token")
FEW, MORE = 2, 3  # layers: what is in memory grows by the same for each, so these two tell it for any number


@dataclass(frozen=True)
class Part:
    """Something in memory; bytes."""

    name: str
    size: int
    note: str = ""


@dataclass(frozen=True)
class StagePlan:
    """One stage's memory.

    parts: what stays.
    passes: what each pass adds at its height.
    """

    stage: str
    parts: tuple[Part, ...]
    passes: tuple[Part, ...]

    @property
    def highest(self) -> Part:
        """The pass that adds most."""
        return max(self.passes, key=lambda part: part.size)

    @property
    def peak(self) -> int:
        """Bytes, those of libraries or of the CUDA context included."""
        return sum(part.size for part in self.parts) + self.highest.size


@dataclass(frozen=True)
class Cast:
    """Who takes part in a stage.

    heads: scalar heads.
    trained_heads: how many of them are trained.
    """

    adapters: tuple[str, ...]
    trained: str | None
    heads: int
    trained_heads: int
    passes: Callable[[PlannedBackbone, Settings], dict[str, int]]


def plan_stage(stage: str, settings: Settings, config: PretrainedConfig, machine: Machine) -> StagePlan:
    """The memory of one stage on a base of this configuration; rows are as long as `tokens` lets them be.

    Raises:
        BaseModelError: `lora.targets` does not fit the base.
    """
    cast = cast_of(stage, settings)
    runtime = settings.runtime
    shape = BaseShape(
        config, settings.base, attention_of(runtime, machine.device), True, runtime.gradient_checkpointing
    )
    frozen = _at_all_layers(config, lambda layers: frozen_sizes(build(shape, layers, ())))
    left = machine.free - machine.overhead - frozen["quantised"] - frozen["unquantised"]
    cache = keeps_cache(runtime.base_cache, frozen["cache"], left)
    shape = BaseShape(shape.config, shape.params, shape.attention, cache, shape.checkpointing)

    def moving(layers: int) -> Sizes:
        backbone = build(shape, layers, cast.adapters, settings.lora)
        if cast.trained:
            backbone.train(cast.trained)
        one = size_of(backbone.adapter_parameters(cast.adapters[0]))
        return {"adapter": one} | cast.passes(backbone, settings)

    sizes = _at_all_layers(config, moving)
    adapter, head = sizes.pop("adapter"), FLOAT32 * (config.hidden_size + 1)
    packed = _packed_size(settings, config, frozen, cache, machine)
    held = 1 + HEAP_HOLES if machine.device.type == "cpu" else 1.0
    sizes = {name: int(held * size) + packed * (name in SAMPLING) for name, size in sizes.items()}
    trained = (adapter if cast.trained else 0) + cast.trained_heads * head
    parts = [
        Part("libraries" if machine.device.type == "cpu" else "CUDA context", machine.overhead),
        Part("base, 4 bits", frozen["quantised"], "NF4, double quantisation"),
        Part("base, the rest", frozen["unquantised"], f"embeddings, output head, norms; {settings.base.dtype}"),
        Part("base cache", frozen["cache"] if cache else 0, "dequantised weights"),
        Part("adapters", len(cast.adapters) * adapter, f"{', '.join(cast.adapters)}; float32"),
        Part("scalar heads", cast.heads * head, "float32"),
        Part("Adam's moments", 2 * trained, "float32"),
    ]
    if stage == "ppo":
        parts.append(Part("the best policy so far", trained, "float32"))
        if machine.device.type == "cpu":  # on a GPU it lies in the machine's memory
            parts.append(Part("experience", experience_size(settings), f"{settings.ppo.rollout_size} answers"))
    if machine.device.type == "cpu" and cast.trained:
        # the state is copied, and then copied once more as the bytes of a file
        sizes["writing a checkpoint"] = 2 * 3 * trained
    return StagePlan(
        stage,
        tuple(part for part in parts if part.size),
        tuple(Part(name, size) for name, size in sizes.items()),
    )


def experience_size(settings: Settings) -> int:
    """Bytes of a rollout with all that is known of it, by the axes in its fields' names; ids and lengths are int64."""
    ppo, tokens = settings.ppo, settings.tokens
    widths = {"BT": tokens.max_prompt + tokens.max_response, "BR": tokens.max_response, "B": 1}
    ids = ("tokens_BT", "prompt_lengths_B", "response_lengths_B", "prompt_ids_B")
    cells = {field.name: widths[field.name.rpartition("_")[2]] for field in fields(Experience)}
    return ppo.rollout_size * sum(width * (8 if name in ids else FLOAT32) for name, width in cells.items())


def cast_of(stage: str, settings: Settings) -> Cast:
    """Who takes part in a stage, and in what passes."""
    if stage == "ppo":
        critic = int(algorithm_of(settings.ppo).critic_objective is not None)
        scored = int(settings.ppo.uses_reward_model)
        adapters = ("sft", "policy", "reward")[: 2 + scored]
        return Cast(adapters, "policy", critic + scored, critic, _ppo)
    return {
        "sft": Cast(("sft",), "sft", 0, 0, _sft),
        "reward": Cast(("reward",), "reward", 1, 1, partial(_reward, "reward")),
        "judge": Cast(("judge",), "judge", 1, 1, partial(_reward, "judge")),
        "dpo": Cast(("sft", "dpo"), "dpo", 0, 0, _dpo),
        "evaluate": Cast(("sft", "policy", "reward", "judge"), None, 2, 0, _evaluate),
        "evaluate_dpo": Cast(("sft", "dpo", "reward", "judge"), None, 2, 0, _evaluate),
    }[stage]


def _sft(backbone: PlannedBackbone, settings: Settings) -> Sizes:
    rows, passes = _rows(settings, settings.sft.batch_size)
    loss = partial(policy_loss, backbone, rows, settings.runtime.logprob_chunk)
    return {
        f"forward and backward, {rows}": training(backbone, loss, True, passes),
        f"forward alone, {rows}": scoring(backbone, loss),
    }


def _reward(section: str, backbone: PlannedBackbone, settings: Settings) -> Sizes:
    pairs, passes = _rows(settings, getattr(settings, section).batch_size, 2)
    one = partial(score, backbone, pairs, _head(backbone))
    return {
        f"forward and backward, 2 x {pairs}": training(backbone, partial(pair_loss, one), True, passes),
        f"forward alone, {pairs}": scoring(backbone, one),
    }


def _dpo(backbone: PlannedBackbone, settings: Settings) -> Sizes:
    pairs, passes = _rows(settings, settings.dpo.batch_size, 2)
    one = partial(policy_loss, backbone, pairs, settings.runtime.logprob_chunk)
    return {
        f"forward and backward, 2 x {pairs}": training(backbone, partial(pair_loss, one), False, passes),
        f"forward alone, 2 x {pairs}": scoring(backbone, partial(pair_loss, one)),
    }


def _ppo(backbone: PlannedBackbone, settings: Settings) -> Sizes:
    cfg, chunk = settings.ppo, settings.runtime.logprob_chunk
    rows, passes = _rows(settings, cfg.minibatch_size)
    critic = _head(backbone) if algorithm_of(cfg).critic_objective is not None else None
    update = partial(policy_loss, backbone, rows, chunk, critic)
    sizes = _answering(
        backbone, settings, cfg.rollout_size, cfg.answers_per_prompt, cfg.sampling_weights == "merged"
    ) | {
        f"log-probabilities, {rows}": scoring(backbone, partial(observation, backbone, rows, chunk)),
        f"update, {rows}": training(backbone, update, False, passes),
    }
    if cfg.uses_reward_model:
        sizes[f"scores, {rows}"] = scoring(backbone, partial(score, backbone, rows, _head(backbone)))
    return sizes


def _evaluate(backbone: PlannedBackbone, settings: Settings) -> Sizes:
    rows, _ = _rows(settings, settings.data.split.heldout)
    logprobs = partial(policy_loss, backbone, rows, settings.runtime.logprob_chunk)
    return _answering(backbone, settings, settings.data.split.heldout, 1, merge=False) | {
        f"log-probabilities, {rows}": scoring(backbone, logprobs),
        f"scores, {rows}": scoring(backbone, partial(score, backbone, rows, _head(backbone))),
    }


def _answering(backbone: PlannedBackbone, settings: Settings, answers: int, samples: int, merge: bool) -> Sizes:
    tokens = settings.tokens
    rows = Rows(min(settings.runtime.rollout_chunk, answers), tokens.max_prompt, tokens.max_response)
    first, last = SAMPLING
    return {first: sampling_first(backbone, rows, samples, merge), last: sampling_last(backbone, rows, merge)}


def _packed_size(settings: Settings, config: PretrainedConfig, frozen: Sizes, cache: bool, machine: Machine) -> int:
    """Bytes of the weights that oneDNN packs for the time of a rollout: copies of all that lie there in 16 bits."""
    if machine.device.type != "cpu" or not can_pack(torch.empty(0, dtype=getattr(torch, settings.base.dtype))):
        return 0
    head = config.vocab_size * config.hidden_size * 2
    return head + (frozen["linears"] if cache or settings.base.quantization == "none" else 0)


def _rows(settings: Settings, batch_size: int, sequences: int = 1) -> tuple[Rows, int]:
    """Rows of a micro-batch, and how many micro-batches a batch has. sequences: of one row."""
    tokens = settings.tokens
    budget = settings.runtime.microbatch_tokens // (sequences * (tokens.max_prompt + tokens.max_response))
    size = min(max(1, budget), batch_size)
    return Rows(size, tokens.max_prompt, tokens.max_response), ceil(batch_size / size)


def _head(backbone: PlannedBackbone) -> ScalarHead:
    with META:
        return ScalarHead(backbone.hidden_size, std=0.0)


def _at_all_layers(config: PretrainedConfig, measure: Callable[[int], Sizes]) -> Sizes:
    few, more = measure(FEW), measure(MORE)
    beyond = config.num_hidden_layers - FEW
    return {name: size + beyond * (more[name] - size) for name, size in few.items()}
