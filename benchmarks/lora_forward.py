"""Our LoRA forward against PEFT's own, on the embedded model in bfloat16: one pass and its backward, interleaved.

python -m benchmarks.lora_forward        (alone on the machine)
"""

import statistics
import time

import pipeline  # noqa: F401  # isort: skip  (before torch: it sets OMP_WAIT_POLICY)

import torch
from peft.tuners import lora

from pipeline.backbone import BaseIdentity
from pipeline.base_model import locate
from pipeline.data.examples import sequences
from pipeline.loading import load_backbone
from pipeline.lora import Linear4bit
from pipeline.params.base import BaseParams, LoraParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.roles import Policy

ROWS, PROMPT, RESPONSE, REPEATS = 8, 50, 46, 7


def main() -> None:
    """Prints medians and their ratio."""
    runtime = load_section("runtime", RuntimeParams, "recipes/demo.yaml")
    torch.set_num_threads(runtime.threads)
    base = load_section("base", BaseParams, "recipes/demo.yaml")
    backbone = load_backbone(locate("embedded"), base, runtime, BaseIdentity("benchmark", 1, "tiny"))
    backbone.add_adapter("sft", load_section("lora", LoraParams, "recipes/demo.yaml"))
    backbone.train("sft")
    policy = Policy(backbone, "sft", 1.0, runtime.logprob_chunk)
    ids = torch.randint(20, 40_000, (ROWS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0)).tolist()
    batch = sequences([(row[:PROMPT], row[PROMPT:]) for row in ids])
    layers = [module for module in backbone.causal.modules() if isinstance(module, Linear4bit)]

    seconds: dict[type, list[float]] = {Linear4bit: [], lora.Linear4bit: []}
    for _ in range(REPEATS):
        for kind, times in seconds.items():
            for layer in layers:
                layer.__class__ = kind
            started = time.perf_counter()
            with backbone.training(dropout=False):
                policy(batch).logprobs_BR.sum().backward()
            times.append(time.perf_counter() - started)
    ours, theirs = (statistics.median(times[1:]) for times in seconds.values())
    print(
        f"{ROWS} rows of {PROMPT + RESPONSE} tokens, forward and backward, {runtime.threads} threads, torch {torch.__version__}"
    )
    print(f"ours {ours:.2f} s, PEFT's {theirs:.2f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
