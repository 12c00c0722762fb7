"""The memory planner: parts by hand, passes against the real ones, and what is refused.

By hand: a Llama of two layers, hidden size 64, inner size 128, four heads and two key-value heads of 16, 320 tokens, with an output matrix of its own.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from conftest import LORA, ROOT, base_params, runtime
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from pipeline import plan, preflight
from pipeline.backbone import Backbone
from pipeline.batch import Pairs
from pipeline.data.examples import sequences
from pipeline.errors import BaseModelError, NoRoomError, ParameterError
from pipeline.heads import ScalarHead
from pipeline.objectives.offline import bradley_terry, sft
from pipeline.planning import passes
from pipeline.planning.bases import KNOWN, configuration
from pipeline.planning.fitting import outlook, refuse_misfit, verdict
from pipeline.planning.live import META, LiveBytes
from pipeline.planning.passes import Rows
from pipeline.planning.settings import GIB, Machine, Settings, card
from pipeline.planning.skeleton import BaseShape, build, frozen_sizes
from pipeline.planning.stages import HEAP_HOLES, Part, StagePlan, experience_size, plan_stage
from pipeline.roles import Policy, RewardModel

LINEARS_OF_A_LAYER = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
PROMPT, RESPONSE, CHUNK = 20, 12, 32
CPU = Machine("a machine", torch.device("cpu"), 8 * GIB, 0)


def settings(**of_runtime: object) -> Settings:
    """The smoke recipe with the tests' runtime."""
    read = Settings.read(ROOT / "recipes" / "smoke.yaml")
    return read.with_("runtime", **(runtime().model_dump() | of_runtime)).with_("lora", **LORA.model_dump())


def shape(config: PretrainedConfig, quantization: str = "nf4", dtype: str = "float32", **changes: object) -> BaseShape:
    fixed = {"attention": "recompute", "cache": True, "checkpointing": False} | changes
    return BaseShape(config, base_params(quantization=quantization, dtype=dtype), **fixed)


def test_bytes_alive_by_hand() -> None:
    """1,000 float32 are 4,000 bytes; a view is none; what is gone does not count, what was there before neither."""
    before = torch.zeros(50)
    with LiveBytes([before]) as live:
        first = torch.zeros(1000)
        second = first * 2
        view = second[:10]
        assert live.now == live.peak == 8000
        del first
        before.mul_(3)
        assert (live.now, live.peak) == (4000, 8000)
        del second
        assert live.now == 4000  # the view holds it
        del view
        assert live.now == 0
        live.restart_peak()
        torch.zeros(200)
        assert live.peak == 800


def test_parts_of_the_base_by_hand() -> None:
    """NF4 has half a byte a weight, a byte for each 64 weights, 4 for each 256 of those, and 1,092 of tables a layer."""
    weights = 2 * sum(inward * outward for inward, outward in LINEARS_OF_A_LAYER)
    assert weights == 73728
    sizes = frozen_sizes(build(shape(configuration("tiny"), dtype="bfloat16"), 2, ()))
    # no layer has more than 256 blocks: 14 linears with one scale of scales each
    assert sizes["quantised"] == 73728 // 2 + 73728 // 64 + 14 * 4 + 14 * 1092
    assert sizes["cache"] == 2 * 73728
    # the largest layer is 64 x 128: 16 bits, three float32 and two bytes of each weight
    assert sizes["quantising"] == 64 * 128 * (2 + 12 + 2)
    # two matrices of 320 x 64, five norms, in bfloat16; and 8 float32 rotary frequencies, twice
    assert sizes["unquantised"] == 2 * (2 * 320 * 64 + 5 * 64) + 2 * 4 * 8


def test_an_output_head_that_is_the_embedding_counts_once() -> None:
    tied = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=64, num_attention_heads=4, tie_word_embeddings=True
    )
    untied = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=64, num_attention_heads=4, tie_word_embeddings=False
    )
    one, two = (frozen_sizes(build(shape(config), 2, ()))["unquantised"] for config in (tied, untied))
    assert two - one == 4 * 320 * 64


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_the_base_takes_what_bitsandbytes_takes(make_backbone: Callable[..., Backbone], family: str) -> None:
    """Summed over what a loaded base really holds: packed weights, both levels of scales, tables."""
    real = make_backbone(family, adapters=(), quantization="nf4", dtype="bfloat16", base_cache="off").causal
    held = 0
    for layer in real.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            state = layer.weight.quant_state
            inner = state.state2
            held += sum(
                t.nbytes for t in (layer.weight.data, state.absmax, state.code, inner.absmax, inner.code, state.offset)
            )
    planned = frozen_sizes(build(shape(real.config, dtype="bfloat16"), 2, ()))
    assert planned["quantised"] == held
    others = {t.data_ptr(): t.nbytes for t in [*real.parameters(), *real.buffers()] if t.dtype != torch.uint8}
    assert planned["unquantised"] == sum(others.values())


@pytest.mark.parametrize(
    ("family", "quantization", "cache", "attention", "checkpointing"),
    [
        ("llama", "none", "on", "recompute", False),
        ("llama", "nf4", "on", "eager", True),
        ("llama", "nf4", "off", "sdpa", False),
        ("gpt2", "nf4", "on", "eager", False),
        ("gpt2", "none", "off", "recompute", True),
        ("qwen2", "nf4", "off", "recompute", True),
        ("qwen2", "none", "on", "sdpa", False),
    ],
)
def test_planned_passes_are_the_real_ones(
    make_backbone: Callable[..., Backbone],
    family: str,
    quantization: str,
    cache: str,
    attention: str,
    checkpointing: bool,
) -> None:
    """The same count of bytes around the real roles on the CPU: SFT, reward model, and a forward alone.

    Real passes hold masks, ids and single numbers besides: a hundredth.
    """
    keys = {
        "quantization": quantization,
        "gradient_checkpointing": checkpointing,
        "base_cache": cache,
        "attention": attention,
    }
    real = make_backbone(family, **keys)
    # one row is a token shorter: where none is padded sdpa gets no mask, and the plan is for rows that are
    rows = sequences([([5 + n] * (PROMPT - (n == 0)), [9 + n] * RESPONSE) for n in range(4)])
    policy, head = Policy(real, "sft", 1.0, CHUNK), ScalarHead(real.hidden_size, 0.1)
    model = RewardModel(real, "sft", head)
    real.train("sft")
    held = shape(
        real.causal.config, quantization, attention=attention, cache=cache == "on", checkpointing=checkpointing
    )
    planned = build(held, 2, ("sft",), LORA)
    planned.train("sft")
    shapes = Rows(4, PROMPT, RESPONSE)
    with META:
        planned_head = ScalarHead(real.hidden_size, 0.0)
    loss = partial(passes.policy_loss, planned, shapes, CHUNK)
    one = partial(passes.score, planned, shapes, planned_head)
    pairs = Pairs(rows, rows)
    for ours, theirs in (
        (loss, lambda: sft(policy(rows).logprobs_BR, rows.response_mask_BR).loss_sum),
        (partial(passes.pair_loss, one), lambda: bradley_terry(*model(pairs), 0.0, 0.0).loss_sum),
    ):
        expected = passes.training(real, theirs, False, 2)
        real.causal.zero_grad(), head.zero_grad()
        assert passes.training(planned, ours, False, 2) == pytest.approx(expected, rel=0.01)
        planned.causal.zero_grad(), planned_head.zero_grad()
    expected = passes.scoring(real, partial(policy, rows))
    assert passes.scoring(planned, loss) == pytest.approx(expected, rel=0.02)


def test_the_cache_of_keys_and_values_by_hand() -> None:
    """Two layers of 2 x 2 heads of 16 float32 are 512 bytes a token, and its mask one more; the height is where tokens are drawn."""
    backbone = build(shape(configuration("tiny")), 2, ("sft",), LORA)
    short, long = (passes.sampling_last(backbone, Rows(8, 100, response), merge=False) for response in (100, 200))
    assert long - short == 8 * 100 * (512 + 1)


def test_two_and_three_layers_tell_seven() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=7,
    )  # fmt: skip
    setup = settings()
    tokens = setup.tokens
    fitting = setup.runtime.microbatch_tokens // (tokens.max_prompt + tokens.max_response)
    planned = plan_stage("sft", setup, config, CPU)
    whole = build(shape(config, setup.base.quantization, setup.base.dtype), 7, ("sft",), LORA)
    whole.train("sft")
    rows = Rows(min(fitting, setup.sft.batch_size), tokens.max_prompt, tokens.max_response)
    micro_batches = -(-setup.sft.batch_size // rows.count)
    loss = partial(passes.policy_loss, whole, rows, setup.runtime.logprob_chunk)
    assert planned.highest.size == int((1 + HEAP_HOLES) * passes.training(whole, loss, True, micro_batches))
    on_a_card = plan_stage("sft", setup.with_("runtime", attention="recompute"), config, card("24GB"))
    assert on_a_card.highest.size == passes.training(whole, loss, True, micro_batches)


def test_an_experience_by_hand() -> None:
    """Tokens (int64), 10 figures a response token and one score (float32), a mark (counted as 4), two lengths and a prompt's key (int64)."""
    setup = settings().with_("tokens", max_prompt=20, max_response=12).with_("ppo", rollout_size=8)
    assert experience_size(setup) == 8 * (32 * 8 + 10 * 12 * 4 + 4 + 4 + 3 * 8)


@pytest.mark.parametrize("stage", ["sft", "reward", "judge", "ppo", "evaluate", "dpo", "evaluate_dpo"])
def test_every_stage_has_a_plan(stage: str) -> None:
    """Adapters of 8,192 weights: rank 4 on linears whose sizes sum up to 1,024 a layer."""
    assert sum(map(sum, LINEARS_OF_A_LAYER)) * 4 * 2 == 8192
    planned = {part.name: part.size for part in plan_stage(stage, settings(), configuration("tiny"), CPU).parts}
    adapters = {"ppo": 3, "dpo": 2, "evaluate": 4, "evaluate_dpo": 4}.get(stage, 1)
    assert planned["adapters"] == adapters * 8192 * 4
    heads = {"reward": 65, "judge": 65, "ppo": 65}.get(stage, 0)
    trained = 0 if stage.startswith("evaluate") else 8192 + heads
    assert planned.get("Adam's moments", 0) == 2 * 4 * trained


def test_the_update_of_ppo_is_a_pass_of_sft_with_a_critic() -> None:
    """Equal rows and micro-batches: what is trained is the policy, whoever was sampled or scored with before."""
    setup = settings().with_("sft", batch_size=8).with_("ppo", minibatch_size=8)
    sft_plan, ppo_plan = (plan_stage(stage, setup, configuration("tiny"), card("24GB")) for stage in ("sft", "ppo"))
    forward = next(part.size for part in sft_plan.passes if part.name.startswith("forward and backward"))
    update = next(part.size for part in ppo_plan.passes if part.name.startswith("update"))
    assert forward < update < 1.2 * forward


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-7B", 7.616),
        ("Llama-3.1-8B", 8.030),
        ("Mistral-7B-v0.3", 7.248),
        ("SmolLM2-135M", 0.1345),
    ],
)
def test_the_table_of_bases_has_their_number_of_weights(name: str, billions: float) -> None:
    """As their model cards count them."""
    config = configuration(name)
    backbone = build(shape(config, "none"), 2, ())
    more = build(shape(config, "none"), 3, ())
    two, three = (sum(weights.numel() for weights in one.causal.parameters()) for one in (backbone, more))
    assert two + (config.num_hidden_layers - 2) * (three - two) == pytest.approx(billions * 1e9, rel=0.001)
    assert name in KNOWN


def test_a_base_that_nobody_knows() -> None:
    with pytest.raises(BaseModelError, match="'hf://a/b@main' is not on this machine; give a folder"):
        configuration("hf://a/b@main")


def test_verdicts_leave_room_for_the_plans_own_error() -> None:
    machine = Machine("m", torch.device("cpu"), 1150, 0)
    said = [
        verdict(StagePlan("sft", (Part("a", size),), (Part("b", 0),)), machine) for size in (1000, 1001, 1322, 1323)
    ]
    assert said == ["fits", "may just fit", "may just fit", "does not fit"]


def test_a_plan_in_one_line() -> None:
    planned = StagePlan(
        "sft", (Part("base", 2 * GIB), Part("adapters", GIB)), (Part("loading", 1), Part("update", GIB // 2))
    )
    machine = Machine("m", torch.device("cpu"), 8 * GIB, 0)
    assert outlook(planned, machine) == "memory plan: about 3.5 GiB at the peak (update), 8.0 GiB free"


def test_models_of_ones_own_are_not_trained_and_lie_there_whole(tmp_path: Path) -> None:
    """10 x 10 and 5 numbers in float32 are 420 bytes, in the stages that score with it; an adapter takes an adapter's place."""
    save_file({"a": torch.zeros(10, 10), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    config, setup = configuration("tiny"), settings()
    plain = {stage: plan_stage(stage, setup, config, CPU) for stage in ("sft", "reward", "judge", "ppo", "evaluate")}
    own = setup.with_("sft", from_="models/sft").with_("reward", from_=str(tmp_path))
    planned = {stage: plan_stage(stage, own, config, CPU) for stage in plain}
    name = "reward model of your own"
    found = {stage: [part.size for part in plan.parts if part.name == name] for stage, plan in planned.items()}
    assert found == {"sft": [], "reward": [420], "judge": [], "ppo": [420], "evaluate": [420]}
    for stage in ("sft", "reward"):
        assert "Adam's moments" in {part.name for part in plain[stage].parts}
        assert "Adam's moments" not in {part.name for part in planned[stage].parts}
        assert not any("backward" in part.name for part in planned[stage].passes)
    adapters = {stage: adapters_size(plan) for stage, plan in plain.items()}
    assert adapters_size(planned["ppo"]) == adapters["ppo"] * 2 // 3
    assert planned["judge"] == plain["judge"]


def adapters_size(planned: StagePlan) -> int:
    return next(part.size for part in planned.parts if part.name == "adapters")


def test_a_certain_misfit_is_refused_with_what_would_fit() -> None:
    setup = settings(microbatch_tokens=4 * 1536).with_("tokens", max_prompt=1024, max_response=512)
    config = configuration("tiny")
    planned = plan_stage("sft", setup, config, CPU)
    refuse_misfit(planned, setup, config, Machine("m", torch.device("cpu"), int(planned.peak / 1.14), 0))
    with pytest.raises(
        NoRoomError,
        match=r"it does not fit into memory: it takes about .* and m has .* With runtime\.microbatch_tokens: 1, runtime\.gradient_checkpointing: true it takes",
    ):
        refuse_misfit(planned, setup, config, Machine("m", torch.device("cpu"), planned.peak // 2, 0))
    with pytest.raises(NoRoomError, match=r"No runtime parameter is enough .* smaller tokens\.max_prompt"):
        refuse_misfit(planned, setup, config, Machine("m", torch.device("cpu"), 100, 0))


def test_preflight_refuses_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 400,000 tokens: attention alone takes terabytes on the tiny base."""
    text = (ROOT / "recipes" / "smoke.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = ["  max_prompt: 400000" if line.startswith("  max_prompt:") else line for line in text.splitlines()]
    Path("params.yaml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(NoRoomError, match="sft: it does not fit"):
        preflight.check_memory()
    told = "\n".join(lines).replace("check_memory: true", "check_memory: false")
    Path("params.yaml").write_text(told, encoding="utf-8")
    preflight.check_memory()


def test_a_cards_size() -> None:
    assert card("24GB").free == 24 * GIB
    assert card("7.5 GiB").free == int(7.5 * GIB)
    with pytest.raises(ParameterError, match="CARD is 'large' but must be a size in GB; for example 24GB"):
        card("large")
    with pytest.raises(ParameterError, match="CARD is '0GB' but must be a size in GB; for example 24GB"):
        card("0GB")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--card", "big"], "CARD is 'big' but must be a size in GB; for example 24GB."),
        (["--tokens", "256x3"], "TOKENS is '256x3' but must be two lengths, of prompt and of response, joined by a plus; for example 256+256."),
        (["--tokens", "0+3"], "TOKENS is '0+3' but must be two lengths"),
        (["--base", "Nobody-7B"], "The configuration of 'Nobody-7B' is not on this machine; give a folder with its config.json, or one of SmolLM2-135M,"),
        (["recipes/none.yaml"], "recipes/none.yaml does not exist;"),
    ],
)  # fmt: skip
def test_make_plan_says_in_one_sentence_what_it_cannot_plan(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = [] if wrong[0].startswith("recipes") else [str(ROOT / "recipes" / "smoke.yaml")]
    monkeypatch.setattr("sys.argv", ["plan", *recipe, *wrong])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_the_card_that_its_name_has(recipe: Path) -> None:
    """As mistral-7b-24gb does. One without a card is for any machine: 24GB are beyond doubt."""
    named = re.search(r"-(\d+gb)$", recipe.stem)
    machine = card(named[1] if named else "24GB")
    read = Settings.read(recipe)
    config = configuration(read.base.model)
    plans = [plan_stage(stage, read, config, machine) for stage in plan.STAGES]
    assert {one.stage: verdict(one, machine) for one in plans} == dict.fromkeys(plan.STAGES, "fits")


def test_make_plan_prints_parts_verdicts_and_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(ROOT / "recipes" / "smoke.yaml")
    monkeypatch.setattr("sys.argv", ["plan", recipe, "--card", "24GB", "--tokens", "32+16"])
    plan.main()
    said = " ".join(capsys.readouterr().out.split())
    for words in ("rows of 32 + 16 tokens", "base, 4 bits", "PPO's peak is", "runtime.gradient_checkpointing: true"):
        assert words in said
