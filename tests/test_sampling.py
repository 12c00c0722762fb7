"""Decoders and weights to sample with: the same samples whichever decodes, and nothing left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import LORA
from peft import LoraConfig, get_peft_model
from torch import Tensor
from worlds import BASES, PROMPTS, SAMPLING, TO_THE_LIMIT, Setting, World, blocks, ppo_params

import benchmarks.rollout
import pipeline.sampling_linears
from pipeline import interruption
from pipeline.backbone import Backbone
from pipeline.batch import Rollout
from pipeline.cuda_graphs import recorded
from pipeline.lean_decoder import LeanDecoder, LeanModel, halves
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate, left_padded
from pipeline.sampler import TransformersDecoder, decoding
from pipeline.sampling_linears import SamplingLinears, lora_layers, merged_weight
from pipeline.side_by_side import SideBySide
from pipeline.tiny import tiny_model

LEAN_FAMILIES = ("llama", "mistral", "qwen2")
WAYS = [(weights, decoder) for weights in ("adapter", "merged") for decoder in ("transformers", "lean")]
NF4 = {"quantization": "nf4", "base_cache": "on"}


def policy_of(backbone: Backbone) -> Policy:
    return Policy(backbone, "sft", 0.9, logprob_chunk=16)


def way(weights: str, decoder: str, sampling: Sampling = SAMPLING) -> Sampling:
    return replace(sampling, weights=weights, decoder=decoder)


def gap(policy: Policy, rollout: Rollout) -> float:
    """The largest difference between the sampler's log-probabilities and those of a plain forward under the adapter."""
    with policy.backbone.inference():
        gap_BR = (policy(rollout).logprobs_BR - rollout.behaviour_logprobs_BR)[rollout.response_mask_BR]
    return float(gap_BR.abs().max())


def no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline.sampling_linears, "free_memory", lambda device: 0)


def same(one: Rollout, other: Rollout) -> bool:
    """Equal to the last bit."""
    return torch.equal(one.tokens_BT, other.tokens_BT) and torch.equal(
        one.behaviour_logprobs_BR, other.behaviour_logprobs_BR
    )


@pytest.mark.parametrize(("weights", "decoder"), WAYS)
@pytest.mark.parametrize("base", [*BASES, Setting("mistral", "float32", "none")], ids=str)
def test_the_samplers_logprobs_are_those_of_a_plain_forward(
    make_backbone: Callable[..., Backbone], base: Setting, weights: str, decoder: str
) -> None:
    """Measured: 2e-6 in float32; in bfloat16 5e-7 with the adapter, and 0.05 merged, because merged weights are rounded."""
    policy = policy_of(make_backbone(**base.keys))
    rollout = generate(policy, PROMPTS, way(weights, decoder), step=0)
    assert 1 <= int(rollout.response_lengths_B.min()) < int(rollout.response_lengths_B.max())  # rows have left
    limit = {"float32": 2e-5, "bfloat16": 0.15 if weights == "merged" else 1e-5}[base.dtype]
    assert gap(policy, rollout) < limit


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("family", LEAN_FAMILIES)
def test_in_bfloat16_the_lean_decoder_has_the_bits_of_transformers(
    make_backbone: Callable[..., Backbone], family: str, quantization: str
) -> None:
    """That is why `auto` takes it there."""
    policy = policy_of(make_backbone(family, dtype="bfloat16", quantization=quantization))
    by_transformers = generate(policy, PROMPTS, way("adapter", "transformers"), step=0)
    assert same(generate(policy, PROMPTS, way("adapter", "auto"), step=0), by_transformers)
    assert same(generate(policy, PROMPTS, way("adapter", "lean"), step=0), by_transformers)


@pytest.mark.parametrize(
    ("family", "decoder", "keys", "expected"),
    [
        ("llama", "auto", {"dtype": "bfloat16"}, LeanDecoder),
        ("llama", "auto", {"dtype": "float32"}, TransformersDecoder),
        ("llama", "lean", {"dtype": "float32"}, LeanDecoder),
        ("llama", "transformers", {"dtype": "bfloat16"}, TransformersDecoder),
        ("gpt2", "lean", {"dtype": "bfloat16"}, TransformersDecoder),
        ("mistral", "lean", {"overrides": {"sliding_window": 64}}, LeanDecoder),
        ("mistral", "lean", {"overrides": {"sliding_window": 63}}, TransformersDecoder),
    ],
)
def test_who_decodes(
    make_backbone: Callable[..., Backbone], family: str, decoder: str, keys: dict, expected: type
) -> None:
    with decoding(make_backbone(family, **keys), "sft", False, decoder, False, columns=64) as open_decoder:
        assert type(open_decoder(2, 64)) is expected


@pytest.mark.parametrize(("weights", "decoder"), WAYS)
@pytest.mark.parametrize("sampling", [SAMPLING, TO_THE_LIMIT], ids=["rows leave the batch", "all run to the limit"])
def test_groups_and_chunks_change_no_sample(
    make_backbone: Callable[..., Backbone], sampling: Sampling, weights: str, decoder: str
) -> None:
    """Three answers to each prompt: chunks of 1 share no prefill, chunks of 5 cut groups apart."""
    policy = policy_of(make_backbone())
    grouped = replace(way(weights, decoder, sampling), samples=3)
    together = generate(policy, PROMPTS, grouped, step=1)
    for chunk in (1, 5):
        apart = generate(policy, PROMPTS, replace(grouped, chunk=chunk), step=1)
        assert torch.equal(together.tokens_BT, apart.tokens_BT)
        torch.testing.assert_close(together.behaviour_logprobs_BR, apart.behaviour_logprobs_BR, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decoder", ["transformers", "lean"])
def test_a_prompt_is_read_once_for_all_its_answers(make_backbone: Callable[..., Backbone], decoder: str) -> None:
    backbone = make_backbone()
    shapes: list[tuple[int, ...]] = []
    embeddings = backbone.causal.get_input_embeddings()
    with embeddings.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape))):
        generate(policy_of(backbone), PROMPTS[:2], replace(way("adapter", decoder, TO_THE_LIMIT), samples=3), step=0)
    step = {"transformers": (6, 1), "lean": (6,)}[decoder]
    assert shapes == [(2, 6)] + [step] * 9  # the longer prompt has 6 tokens, an answer 10


def test_left_padding_by_hand() -> None:
    tokens_UP, mask_UP, of_B = left_padded([[7, 8], [7, 8], [9], [7, 8]])
    assert tokens_UP.tolist() == [[7, 8], [0, 9]]
    assert mask_UP.tolist() == [[True, True], [False, True]]
    assert of_B.tolist() == [0, 0, 1, 0]


# --- nothing is left behind ---


def state(backbone: Backbone) -> tuple:
    """All that a rollout must leave as it was: which module stands where, weights, cached weights, who is trainable."""
    modules = [(name, id(module), module.training) for name, module in backbone.causal.named_modules()]
    cached = [
        module.cached_weight_OI.clone()
        for module in backbone.causal.modules()
        if getattr(module, "cached_weight_OI", None) is not None
    ]
    trainable = [name for name, parameter in backbone.causal.named_parameters() if parameter.requires_grad]
    return modules, trainable, backbone.base_hash(), backbone.adapter_hash("sft"), torch.is_grad_enabled(), cached


def assert_unchanged(before: tuple, after: tuple) -> None:
    assert before[:-1] == after[:-1]
    assert len(before[-1]) == len(after[-1])
    assert all(map(torch.equal, before[-1], after[-1]))


@contextmanager
def stopped(backbone: Backbone, how: str) -> Iterator[None]:
    """In the third decode step something fails, or a signal comes, which the next poll answers."""
    passes = 0

    def interfere(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 3 and how == "error":
            raise RuntimeError("no more memory")
        if passes == 3 and how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    expected = {"error": pytest.raises(RuntimeError), "signal": pytest.raises(interruption.Interrupted)}
    listening = interruption.listening() if how == "signal" else nullcontext()
    embeddings = backbone.causal.get_input_embeddings()
    with expected.get(how, nullcontext()), listening, embeddings.register_forward_pre_hook(interfere):
        yield
    assert passes >= 3


@pytest.mark.parametrize("how", ["to its end", "error", "signal"])
@pytest.mark.parametrize(("weights", "decoder"), WAYS)
@pytest.mark.parametrize(
    "keys",
    [{}, NF4, {"quantization": "nf4", "base_cache": "off"}, NF4 | {"dtype": "bfloat16"}],
    ids=["copied", "in the base cache", "made anew", "packed"],
)
def test_a_rollout_leaves_nothing_behind(
    make_backbone: Callable[..., Backbone], keys: dict, weights: str, decoder: str, how: str
) -> None:
    backbone = make_backbone(**keys)
    backbone.train("sft")
    before = state(backbone)
    with stopped(backbone, how):
        generate(policy_of(backbone), PROMPTS, way(weights, decoder, TO_THE_LIMIT), step=0)
    assert_unchanged(before, state(backbone))


def test_while_the_base_cache_holds_merged_weights_it_differs(make_backbone: Callable[..., Backbone]) -> None:
    """Without this the test above could pass on a merge that changes nothing."""
    backbone = make_backbone(**NF4)
    cached, layers = state(backbone)[-1], [layer.base_layer for _, _, layer in lora_layers(backbone.causal)]
    with decoding(backbone, "sft", True, "transformers", False, columns=64):
        merged = [layer.cached_weight_OI.clone() for layer in layers]
    assert len(merged) == len(cached) == 14
    assert not any(map(torch.equal, cached, merged))


def test_an_interrupted_merge_is_undone(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth layer cannot be merged; the four before it are made anew."""
    backbone = make_backbone(**NF4)
    before = state(backbone)
    real, calls = merged_weight, []

    def fail(*args: object) -> Tensor:
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("no more memory")
        return real(*args)

    monkeypatch.setattr(pipeline.sampling_linears, "merged_weight", fail)
    for decoder in ("transformers", "lean"):
        calls.clear()
        with pytest.raises(RuntimeError):
            generate(policy_of(backbone), PROMPTS, way("merged", decoder), step=0)
        assert_unchanged(before, state(backbone))


@pytest.mark.parametrize("decoder", ["transformers", "lean"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_where_merged_weights_lie_changes_no_bit(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch, quantization: str, decoder: str
) -> None:
    """In bfloat16: packed copies; without room for a copy in the base cache; without a cache made anew in each product."""
    sampled = []
    for cache, room in (("on", True), ("on", False), ("off", False), ("off", True)):
        with monkeypatch.context() as patch:
            if not room:
                no_room(patch)
            backbone = make_backbone(quantization=quantization, base_cache=cache, dtype="bfloat16")
            sampled.append(generate(policy_of(backbone), PROMPTS, way("merged", decoder), step=0))
    assert all(same(sampled[0], other) for other in sampled[1:])


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_every_matrix_learns_after_merged_rollouts(make_backbone: Callable[..., Backbone], quantization: str) -> None:
    """Two iterations sampled from merged weights: all B's of the policy have moved, no weight of base or reference has."""
    world = World(make_backbone, ppo_params(sampling_weights="merged"), quantization=quantization)
    frozen = world.backbone.base_hash(), world.backbone.adapter_hash("sft")
    before = {name: matrix.clone() for name, matrix in world.backbone.adapter_state("policy").items()}
    world.train(2)
    after = world.backbone.adapter_state("policy")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "lora_B" in name} <= moved
    assert frozen == (world.backbone.base_hash(), world.backbone.adapter_hash("sft"))


def test_the_gap_of_merged_weights_is_logged(make_backbone: Callable[..., Backbone]) -> None:
    """Rule 6.10: it is measured at each iteration. In bfloat16 there is one with merged weights and none without."""
    gaps = {}
    for weights in ("adapter", "merged"):
        world = World(make_backbone, ppo_params(sampling_weights=weights), dtype="bfloat16")
        world.train(1, log=lambda step, figures, _, weights=weights: gaps.update({weights: figures["sampler_gap_max"]}))
    assert gaps["adapter"] < 1e-5 < 1e-3 < gaps["merged"]


# --- the parts ---


def test_a_merged_weight_by_hand() -> None:
    """weight [1 2] + 2 * B [0.5] A [3 4] = [4 6]."""
    layer = SimpleNamespace(
        lora_A={"a": SimpleNamespace(weight=torch.tensor([[3.0, 4.0]]))},
        lora_B={"a": SimpleNamespace(weight=torch.tensor([[0.5]]))},
        scaling={"a": 2.0},
    )
    assert merged_weight(torch.tensor([[1.0, 2.0]]), layer, "a").tolist() == [[4.0, 6.0]]


def test_stacked_adapters_are_those_of_the_layers_side_by_side(make_backbone: Callable[..., Backbone]) -> None:
    """The middle one of three layers has no adapter."""
    attention = blocks(make_backbone())[0].self_attn
    a_RI, b_OR = SideBySide(attention.q_proj, torch.nn.Linear(64, 8), attention.v_proj).stacked(torch.float32)
    x = torch.randn(3, 64)
    parts = [
        2.0 * x @ layer.lora_A["sft"].weight.T @ layer.lora_B["sft"].weight.T  # alpha / r is 8 / 4
        for layer in (attention.q_proj, attention.v_proj)
    ]
    expected = torch.cat([parts[0], torch.zeros(3, 8), parts[1]], dim=1)
    torch.testing.assert_close(x @ a_RI.T @ b_OR.T, expected, rtol=0, atol=1e-5)


def test_layers_without_an_adapter_are_sampled_too(make_backbone: Callable[..., Backbone]) -> None:
    """lora.targets may name a few linears only: v alone of q, k and v."""
    backbone = make_backbone(lora=LORA.model_copy(update={"targets": ["v_proj", "down_proj"]}))
    assert len(lora_layers(backbone.causal)) == 4
    policy = policy_of(backbone)
    for weights, decoder in WAYS:
        assert gap(policy, generate(policy, PROMPTS, way(weights, decoder), step=0)) < 2e-5


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-5), ("float32", 2e-5)])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_the_raw_base_is_sampled_too(
    make_backbone: Callable[..., Backbone], dtype: str, limit: float, quantization: str
) -> None:
    policy = Policy(make_backbone(dtype=dtype, quantization=quantization), None, 1.0, logprob_chunk=16)
    for weights, decoder in WAYS:
        assert gap(policy, generate(policy, PROMPTS, way(weights, decoder), step=0)) < limit


# --- CUDA graphs, as far as a CPU can show ---


def test_sizes_of_recorded_steps_by_hand() -> None:
    assert halves(6) == [6, 3, 2, 1]
    assert halves(1) == [1]


def test_a_recorded_step_samples_the_same(make_backbone: Callable[..., Backbone]) -> None:
    """What stands for a graph: inputs are copied into buffers of its own and its one result is overwritten at each call."""
    backbone = make_backbone()
    made: list[int] = []

    def record(function: Callable[..., Tensor], *examples: Tensor) -> Callable[..., Tensor]:
        inputs = [example.clone() for example in examples]
        output = function(*inputs).clone()
        made.append(len(inputs[0]))

        def replay(*values: Tensor) -> Tensor:
            for mine, value in zip(inputs, values, strict=True):
                mine.copy_(value)
            return output.copy_(function(*inputs))

        return replay

    def answers(record: Callable | None) -> tuple[list[list[int]], list[Tensor]]:
        """Eight rows; after each step those leave whose token is divisible by three, the first never."""
        tokens_UP, mask_UP, of_B = left_padded([prompt.ids for prompt in PROMPTS])
        rows, ids, logits = list(range(8)), [[] for _ in range(8)], []
        with backbone.inference():
            decoder = LeanDecoder(LeanModel(backbone, SamplingLinears(backbone, False)), 8, 40, record)
            logits_BV = decoder.start(tokens_UP, mask_UP, of_B)
            for _ in range(12):
                next_B = logits_BV.argmax(1)
                for row, token in zip(rows, next_B.tolist(), strict=True):
                    ids[row].append(token)
                going_B = torch.tensor(
                    [row == 0 or token % 3 > 0 for row, token in zip(rows, next_B.tolist(), strict=True)]
                )
                order = decoder.keep(going_B)
                rows = [rows[place] for place in order.tolist()]
                logits_BV = decoder.step(next_B[order])
                logits.append(logits_BV[rows.index(0)].clone())
        return ids, logits

    plain, replayed = answers(None), answers(record)
    assert plain[0] == replayed[0]
    assert len({len(row) for row in plain[0]}) > 2  # rows have left at different steps
    torch.testing.assert_close(replayed[1], plain[1], rtol=0, atol=1e-4)
    assert set(made) <= {8, 4, 2, 1} and len(made) == len(set(made)) > 1


def test_recording_calls_the_gpu_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run, with a recorder in place of torch.cuda: warm-up beside, one capture, and a replay on copied inputs."""
    said: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            said.append("wait")

    @contextmanager
    def within(name: str) -> Iterator[None]:
        said.append(f"{name} begins")
        yield
        said.append(f"{name} ends")

    graph = SimpleNamespace(replay=lambda: said.append("replay"))
    fake = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda _: within("warm-up"),
        CUDAGraph=lambda: graph,
        graph=lambda _: within("capture"),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    seen: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        said.append("call")
        seen.append(x)
        return 2 * x

    example = torch.tensor([1.0])
    replay = recorded(double, example)
    assert replay(torch.tensor([5.0])).tolist() == [2.0]  # what was captured: the recorder cannot compute
    assert seen[-1].tolist() == [5.0] and example.tolist() == [1.0]
    assert said == [
        *("wait", "warm-up begins", "call", "warm-up ends", "wait"),
        *("capture begins", "call", "capture ends", "replay"),
    ]


# --- the benchmark ---


def test_the_benchmark_runs_all_ways(make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model, once; it checks for itself that each way makes the tokens that are asked for."""
    for name, value in {"ROWS": 8, "PROMPT": 4, "FIXED": 3, "SHORTEST": 2, "LONGEST": 6}.items():
        monkeypatch.setattr(benchmarks.rollout, name, value)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    found = benchmarks.rollout.measure(policy_of(make_backbone(dtype="bfloat16")), model, repeats=1)
    assert {case: list(ways) for case, ways in found.items()} == {
        case: [
            *("generate", "ours, as in training", "+ finished rows leave", "+ one prefill for a group"),
            *("+ linears packed", "+ lean decoder", "+ adapter merged"),
        ]
        for case in ("fixed", "varying", "groups")
    }
    assert all(speed > 0 for ways in found.values() for speed in ways.values())
