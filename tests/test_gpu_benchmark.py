"""The script for a GPU, dry: every part on the CPU with a tiny shape; memory and time that run out."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from bitsandbytes.functional import dequantize_4bit
from conftest import runtime
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import gpu, large, rates
from benchmarks.large import SHAPES, SPREAD, large_base
from benchmarks.parts_in_time import run_parts
from pipeline.quantization import FrozenLinear4bit

CPU = torch.device("cpu")


def test_a_dry_run_writes_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SQUARE", {"cpu": 64})
    monkeypatch.setattr(rates, "MEGABYTES", {"cpu": (1,)})
    out = tmp_path / "gpu.json"
    gpu.main(["--shape", "tiny", "--device", "cpu", "--out", str(out)])
    report = json.loads(out.read_text())
    found = report["parts"]
    assert set(found) == {
        "rates",
        "determinism",
        *(f"{stage}, base cache {cache}" for stage in ("sft", "ppo") for cache in ("on", "off")),
        "reward, base cache on",
    }
    assert not any("failed" in figures or "skipped" in figures for figures in found.values())
    assert found["determinism"]["equal"] is True
    for cache in ("on", "off"):
        ppo = found[f"ppo, base cache {cache}"]
        seconds = ppo["seconds"]
        assert ppo["rollout_tokens_per_second"] == pytest.approx(4 * 4 / seconds["rollout"])
        assert ppo["update_tokens_per_second"] == pytest.approx(4 * 12 / seconds["update"])
        # two layers of 2 x 64 x 64 + 2 x 64 x 32 + 3 x 64 x 128 weights, a head of 320 x 64; one epoch of 4 rows of 12 tokens, 4 of them answer
        body, head, lora = 2 * 36_864, 20_480, 2 * 16 * (2 * 128 + 2 * 96 + 3 * 192)
        operations = 4 * body * 48 + 4 * head * 16 + 6 * lora * 48
        least = operations / found["rates"]["flops"] + 28 * lora / found["rates"]["bandwidth"]
        assert ppo["update_share_of_flop_roofline"] == pytest.approx(least / seconds["update"])
        weights = body * (2 if cache == "on" else 0.5 + 1 / 64) + 2 * head
        step = max(
            2 * (body + head) * 4 / found["rates"]["flops"],
            (weights + 2 * 2 * 2 * 32 * 4 * 10) / found["rates"]["bandwidth"],
        )
        assert ppo["decode_share_of_bandwidth_roofline"] == pytest.approx(
            3 * step / (seconds["rollout"] - seconds["prefill"])
        )
        assert ppo["peak_gb"] > 0 and ppo["halved_for_memory"] == []


def record_in(found: dict[str, Any]) -> Any:
    """A `record` that keeps what it is told."""
    return lambda name, figures: found.update({name: figures})


def test_a_part_that_runs_out_of_memory_is_recorded_and_the_next_begins() -> None:
    found: dict[str, Any] = {}
    cleaned = []

    def too_large() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.\nmore")

    run_parts({"one": too_large, "two": lambda: {"x": 1}}, record_in(found), 60, lambda: cleaned.append(1), lambda: 0.0)
    assert found == {
        "one": {
            "failed": "out of memory",
            "said": "CUDA out of memory. Tried to allocate 12 GiB.",
            "wall_seconds": 0.0,
        },
        "two": {"x": 1, "wall_seconds": 0.0},
    }
    assert len(cleaned) == 2


def test_no_part_goes_on_when_time_is_up() -> None:
    found: dict[str, Any] = {}

    def endless() -> dict[str, Any]:
        while True:
            time.sleep(0.01)

    run_parts({"one": endless, "two": lambda: {"x": 1}}, record_in(found), 0.2, lambda: None)
    assert found["one"]["failed"] == "out of time"
    assert found["two"] == {"skipped": "no time was left"}


def test_other_errors_are_not_swallowed() -> None:
    def wrong() -> dict[str, Any]:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_parts({"one": wrong}, lambda *_: None, 60, lambda: None)


def test_the_random_base_is_packed_and_whole() -> None:
    """14 linears of two layers in 4 bits, nothing left without memory, rotary frequencies real: 1, ..., for heads of 16."""
    base = large_base("tiny", CPU, runtime(base_cache="off"))
    layers = [module for module in base.causal.modules() if isinstance(module, FrozenLinear4bit)]
    assert len(layers) == 14
    assert all(layer.weight.dtype == torch.uint8 and layer.cached_weight_OI is None for layer in layers)
    assert not any(tensor.is_meta for tensor in base.causal.state_dict().values())
    spread = float(dequantize_4bit(layers[0].weight.data, layers[0].weight.quant_state).float().std())
    assert spread == pytest.approx(SPREAD, rel=0.1)
    frequencies = base.decoder.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 10_000.0 ** (-torch.arange(0, 16, 2) / 16))
    kept = large_base("tiny", CPU, runtime(base_cache="on")).causal.modules()
    assert {m.cached_weight_OI.dtype for m in kept if isinstance(m, FrozenLinear4bit)} == {torch.bfloat16}


def test_every_matrix_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer 7 linears and 2 norms, then the last norm, the embedding and the head; no 16-bit copy beside the packed one."""
    made = []
    random = large._random
    monkeypatch.setattr(large, "_random", lambda empty: made.append(tuple(empty.shape)) or random(empty))
    large_base("tiny", CPU, runtime(base_cache="off"))
    assert len(made) == 2 * (7 + 2) + 1 + 2
    assert made.count((320, 64)) == 2 and made.count((64, 128)) == 2


@pytest.mark.parametrize(("name", "billions"), [("llama", 6.738), ("mistral", 7.248), ("qwen2.5", 7.616)], ids=str)
def test_the_shapes_are_those_of_the_7b_models(name: str, billions: float) -> None:
    """The parameter counts that their makers publish; biases and norms included, without memory."""
    shape = dict(SHAPES[name])
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape.pop("model_type"), **shape, tie_word_embeddings=False)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)
