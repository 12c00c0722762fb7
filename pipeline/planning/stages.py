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

    adapters: in memory; the last one is trained, where `trains`, and what passes are done with.
    heads: scalar heads.
    trained_heads: how many of them are trained.
    scorers: reward models and judges, by name, whether they are adapters or whole models.
    """

    adapters: tuple[str, ...]
    trains: bool
    heads: int
    trained_heads: int
    passes: Callable[[PlannedBackbone, Settings], dict[str, int]]
    scorers: tuple[str, ...] = ()


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
    frozen = at_all_layers(config, lambda layers: frozen_sizes(build(shape, layers, ())))
    left = machine.free - machine.overhead - frozen["quantised"] - frozen["unquantised"]
    cache = keeps_cache(runtime.base_cache, frozen["cache"], left)
    shape = BaseShape(shape.config, shape.params, shape.attention, cache, shape.checkpointing)

    def moving(layers: int) -> Sizes:
        backbone = build(shape, layers, cast.adapters, settings.lora)
        if cast.trains:
            backbone.train(backbone.adapter)
        return {"adapter": size_of(backbone.adapter_parameters(backbone.adapter))} | cast.passes(backbone, settings)

    passes = at_all_layers(config, moving)
    adapter, head = passes.pop("adapter"), FLOAT32 * (config.hidden_size + 1)
    trained = (adapter if cast.trains else 0) + cast.trained_heads * head
    base = [
        Part("libraries" if machine.on_cpu else "CUDA context", machine.overhead),
        Part("base, 4 bits", frozen["quantised"], "NF4, double quantisation"),
        Part("base, not quantised", frozen["unquantised"], settings.base.dtype),
    ]
    others = [
        *(
            Part(f"{name} model of your own", size, settings.base.dtype)
            for name, size in settings.own_models.items()
            if name in cast.scorers
        ),
        Part("base cache", frozen["cache"] if cache else 0, "dequantised weights"),
        Part("adapters", len(cast.adapters) * adapter, "float32"),
        Part("scalar heads", cast.heads * head, "float32"),
        Part("Adam's moments", 2 * trained, "float32"),
        Part("the best policy so far", trained if stage == "ppo" else 0, "float32"),
        Part("experience", experience_size(settings) if stage == "ppo" and machine.on_cpu else 0),
    ]
    if machine.on_cpu:
        packed = _packed_size(settings, config, frozen, cache)
        passes = {name: int((1 + HEAP_HOLES) * size) + packed * (name in SAMPLING) for name, size in passes.items()}
        # layer after layer, before anything else is there; weights are read as they are needed
        passes["quantising the base"] = frozen["quantising"] - sum(part.size for part in others)
        # the state is copied, and then copied once more as the bytes of a file
        passes["writing a checkpoint"] = 2 * 3 * trained
    return StagePlan(
        stage,
        tuple(part for part in (*base, *others) if part.size),
        tuple(Part(name, size) for name, size in passes.items() if size > 0),
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
        scorers = ("reward",) if settings.ppo.uses_reward_model else ()
        adapters = _adapters(settings, scorers, "sft", "policy")
        return Cast(adapters, True, critic + len(scorers), critic, _ppo, scorers)
    if stage in ("reward", "judge"):
        own = getattr(settings, stage).from_ is not None
        adapters = _adapters(settings, (stage,))
        return Cast(adapters, not own, 1, 0 if own else 1, partial(_reward, stage), (stage,))
    scorers = ("reward", "judge")
    return {
        "sft": Cast(("sft",), settings.sft.from_ is None, 0, 0, _sft),
        "dpo": Cast(("sft", "dpo"), True, 0, 0, _dpo),
        "evaluate": Cast(_adapters(settings, scorers, "sft", "policy"), False, 2, 0, _evaluate, scorers),
        "evaluate_dpo": Cast(_adapters(settings, scorers, "sft", "dpo"), False, 2, 0, _evaluate, scorers),
    }[stage]


def _adapters(settings: Settings, scorers: tuple[str, ...], *others: str) -> tuple[str, ...]:
    """Scorers that are adapters, and then the others."""
    return (*(name for name in scorers if name not in settings.own_models), *others)


def _sft(backbone: PlannedBackbone, settings: Settings) -> Sizes:
    rows, passes = _rows(settings, settings.sft.batch_size)
    loss = partial(policy_loss, backbone, rows, settings.runtime.logprob_chunk)
    sizes = {f"forward alone, {rows}": scoring(backbone, loss)}
    if settings.sft.from_ is None:
        sizes[f"forward and backward, {rows}"] = training(backbone, loss, True, passes)
    return sizes


def _reward(section: str, backbone: PlannedBackbone, settings: Settings) -> Sizes:
    pairs, passes = _rows(settings, getattr(settings, section).batch_size, 2)
    one = partial(score, backbone, pairs, _head(backbone))
    sizes = {f"forward alone, {pairs}": scoring(backbone, one)}
    if getattr(settings, section).from_ is None:
        sizes[f"forward and backward, 2 x {pairs}"] = training(backbone, partial(pair_loss, one), True, passes)
    return sizes


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


def _packed_size(settings: Settings, config: PretrainedConfig, frozen: Sizes, cache: bool) -> int:
    """Bytes of the weights that oneDNN packs for the time of a rollout: copies of all that lie there in 16 bits."""
    if not can_pack(torch.empty(0, dtype=getattr(torch, settings.base.dtype))):
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


def at_all_layers(config: PretrainedConfig, measure: Callable[[int], Sizes]) -> Sizes:
    """What `measure` counts of a model with so many layers, for as many as the base has: each layer adds the same."""
    few, more = measure(FEW), measure(MORE)
    beyond = config.num_hidden_layers - FEW
    return {name: size + beyond * (more[name] - size) for name, size in few.items()}
