"""One prepared script for a CUDA machine without network: what a 7B run costs there.

    python -m benchmarks.gpu                              # Llama-2-7B's shape; ends within 8 minutes by itself
    python -m benchmarks.gpu --shape qwen2.5 --out results.json
    python -m benchmarks.gpu --shape tiny --device cpu    # a dry run in seconds

Random weights on NF4, prompts of 256 tokens, answers of 256, 64 answers per rollout. Each part's figures are written as soon as it ends; a part
that runs out of memory is recorded and the next one begins.
"""

import argparse
import gc
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

import torch

from benchmarks.floor import beats, shape_of
from benchmarks.large import SHAPES, large_base
from benchmarks.ours.offline import reward_seconds, sft_seconds
from benchmarks.ours.roles import PACKAGES, Roles, Stopwatch, asked, make_roles, sampling_of, train
from benchmarks.parts_in_time import run_parts
from benchmarks.probe import ROOT, peak_gb
from benchmarks.rates import rates
from benchmarks.setting import GPU_RUNTIME, Setting, our_setting, rows_at_once
from benchmarks.work import Work
from pipeline.backbone import Backbone
from pipeline.out_of_memory import reporting
from pipeline.planning.work import Rates, decoding
from pipeline.randomness import prepare_torch
from pipeline.rollout import generate
from pipeline.weights import hash_tensors

SECONDS = 450.0  # less than the 8 minutes that the whole may take: start and end need some
OFFLINE_ROWS = 16  # rows, or pairs, per optimizer step of SFT and of the reward model
WARMING_ROWS = 4
REPEATED = 3  # iterations whose result is compared
NF4_BYTES = 0.5 + 1 / 64  # per weight as packed: 4 bits, and 8 bits of scale for each block of 64

LARGE = Work(rows=64, prompt=256, response=256, epochs=2, warmup=0, iterations=1, highest_id=31_000)
TINY = Work(rows=4, prompt=8, response=4, epochs=1, warmup=0, iterations=1, highest_id=300)


@dataclass
class Bench:
    """One base, and what is measured on it in turn; the device's rates are known after the first part."""

    shape: str
    device: torch.device
    work: Work
    setting: Setting
    base: Backbone | None = None
    rates: Rates | None = None

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def open_base(self, cache: str) -> None:
        """A fresh base, without adapters, in the place of the one before; its cache on or off."""
        self.base = None
        self.clean_up()
        runtime = self.setting.changed({"runtime": {"base_cache": cache}}).runtime
        prepare_torch(0, runtime)
        self.base = large_base(self.shape, self.device, runtime)

    def measured(self, cache: str, part: Callable[["Bench"], dict[str, Any]]) -> dict[str, Any]:
        """A part's figures on a fresh base, with what the base holds, the part's peak memory, and what was halved to fit."""
        self.open_base(cache)
        held = self.held_gb()
        self.forget_peak()
        halved: list[str] = []
        with reporting(lambda name, limit: halved.append(f"{name} {limit}")):
            figures = part(self)
        return figures | {"base_gb": held, "peak_gb": self.peak_gb(), "halved_for_memory": halved}

    def held_gb(self) -> float:
        """What is allocated now, in 10^9 bytes; on the CPU the peak so far."""
        return torch.cuda.memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else peak_gb()

    def peak_gb(self) -> float:
        """The most that was allocated since `forget_peak`; on the CPU since the process began."""
        return torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else peak_gb()

    def forget_peak(self) -> None:
        """The next peak is counted from here."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def clean_up(self) -> None:
        """What no part holds any more goes back to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_rates(bench: Bench) -> dict[str, Any]:
    """The device's best, from which the rooflines come."""
    found = rates(bench.device)
    bench.rates = Rates(**found)
    return found


def measure_offline(steps: Callable[..., list[float]], rows_per_step: int, bench: Bench) -> dict[str, Any]:
    """Seconds and tokens per second of optimizer steps of SFT or of the reward model."""
    work = replace(bench.work, rows=min(OFFLINE_ROWS, bench.work.rows), warmup=1, iterations=2)
    seconds = steps(bench.base, bench.setting, work, bench.synchronize)[work.warmup :]
    tokens = rows_per_step * work.rows * work.row_tokens
    median = statistics.median(seconds)
    return {"seconds": seconds, "tokens_per_second": tokens / median}


def measure_ppo(cache: str, bench: Bench) -> dict[str, Any]:
    """Seconds and tokens per second of each beat, and the share of what the card could do."""
    work = bench.work
    stopwatch = Stopwatch(bench.synchronize)
    roles = make_roles(bench.base, bench.setting)
    few = replace(work, rows=WARMING_ROWS, response=2)  # what a first pass loads and chooses is no part of an iteration
    train(roles, our_setting(few, bench_changes(bench.device)), few, Stopwatch(bench.synchronize))
    train(roles, bench.setting, work, stopwatch)
    seconds = stopwatch.seconds[-1] | {"prefill": _prefill_seconds(bench, roles)}
    decode_seconds = seconds["rollout"] - seconds["prefill"]
    new_tokens, tokens = work.rows * work.response, work.rows * work.row_tokens
    figures = {
        "seconds": seconds,
        "rollout_tokens_per_second": new_tokens / seconds["rollout"],
        "decode_tokens_per_second": (new_tokens - work.rows) / decode_seconds,
        "evaluate_tokens_per_second": tokens / seconds["evaluate"],
        "update_tokens_per_second": work.updated_tokens / seconds["update"],
    }
    if bench.rates is None:
        return figures
    shape = shape_of(SHAPES[bench.shape], work.lora_r, 2.0 if cache == "on" else NF4_BYTES)
    least_update = beats(shape, bench.rates, work.rows, work.prompt, work.response, work.epochs).update
    least_decoding = decoding(shape, bench.rates, work.rows, work.prompt, work.response)
    # the floor over what was measured: 1 is the roofline
    return figures | {
        "decode_share_of_bandwidth_roofline": least_decoding / decode_seconds,
        "update_share_of_flop_roofline": least_update / seconds["update"],
    }


def _prefill_seconds(bench: Bench, roles: Roles) -> float:
    """A rollout of one token: what a rollout takes until decoding begins."""
    prompts = asked(bench.work)[0]
    watch = Stopwatch(bench.synchronize)
    started = watch.now()
    generate(roles.policy, prompts, sampling_of(bench.setting, 1), step=0)
    return watch.now() - started


def measure_determinism(bench: Bench) -> dict[str, Any]:
    """The hash of policy and critic after three iterations, twice from the same seed, each time on a fresh base."""
    work = replace(
        bench.work, rows=min(16, bench.work.rows), response=min(64, bench.work.response), warmup=0, iterations=REPEATED
    )
    setting = our_setting(work, bench_changes(bench.device))
    assert setting.runtime.deterministic, "the recipe must ask for deterministic algorithms"
    hashes = []
    for _ in range(2):
        bench.open_base("on")
        hashes.append(_trained_hash(bench, setting, work))
    return {"iterations": REPEATED, "hashes": hashes, "equal": hashes[0] == hashes[1]}


def _trained_hash(bench: Bench, setting: Setting, work: Work) -> str:
    roles: Roles = make_roles(bench.base, setting)
    before = trained_hash(roles)
    train(roles, setting, work, Stopwatch(bench.synchronize))
    after = trained_hash(roles)
    assert before != after, "nothing was trained, so equal hashes would mean nothing"
    return after


def trained_hash(roles: Roles) -> str:
    """Of everything that PPO trains."""
    head = {f"head.{name}": tensor for name, tensor in roles.policy.value_head.state_dict().items()}
    return hash_tensors(roles.policy.backbone.adapter_state("policy") | head)


def bench_changes(device: torch.device) -> dict[str, dict[str, Any]]:
    """What differs from the setting of the CPU benchmark."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return {
        "base": {"quantization": "nf4"},
        "runtime": {"device": kind} | GPU_RUNTIME,
    }


def parts_of(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """The parts, the most wanted first."""

    def with_cache(cache: str, part: Callable[[Bench], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: bench.measured(cache, part)

    return {
        "rates": partial(measure_rates, bench),
        "ppo, base cache on": with_cache("on", partial(measure_ppo, "on")),
        "sft, base cache on": with_cache("on", partial(measure_offline, sft_seconds, 1)),
        "reward, base cache on": with_cache("on", partial(measure_offline, reward_seconds, 2)),
        "determinism": partial(measure_determinism, bench),
        "sft, base cache off": with_cache("off", partial(measure_offline, sft_seconds, 1)),
        "ppo, base cache off": with_cache("off", partial(measure_ppo, "off")),
    }


def circumstances(bench: Bench) -> dict[str, Any]:
    """What was measured, on what, with which versions."""
    on_gpu = bench.device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(bench.device) if on_gpu else platform.machine(),
        "cuda": torch.version.cuda,
        "versions": {package: version(package) for package in PACKAGES},
        "shape": {"name": bench.shape, **SHAPES[bench.shape]},
        "work": asdict(bench.work),
        "rows_at_once": rows_at_once(bench.setting.runtime, bench.work.row_tokens),
        "setting": bench.setting.stated(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no part begins, and none goes on, after these")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; check driver and torch build, or try a dry run: --shape tiny --device cpu")
    device = torch.device(asked.device)
    work = TINY if asked.shape == "tiny" else LARGE
    bench = Bench(asked.shape, device, work, our_setting(work, bench_changes(device)))
    report = circumstances(bench) | {"parts": {}}

    def record(name: str, figures: dict[str, Any]) -> None:
        report["parts"][name] = figures
        asked.out.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(figures)}", flush=True)

    run_parts(parts_of(bench), record, asked.seconds, bench.clean_up)


if __name__ == "__main__":
    main()
