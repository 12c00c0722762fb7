"""Our LoRA forward against PEFT's own, on the embedded model in bfloat16: one pass and its backward, interleaved.

python -m benchmarks.lora_forward        (alone on the machine)
"""

import statistics
import time

import torch
from peft.tuners import lora

from benchmarks.parts import embedded_policy, random_rows
from pipeline.lora import Linear4bit

ROWS, PROMPT, RESPONSE, REPEATS = 8, 50, 46, 7


def main() -> None:
    """Prints medians and their ratio."""
    policy = embedded_policy()
    batch = random_rows(ROWS, PROMPT, RESPONSE)
    layers = [module for module in policy.backbone.causal.modules() if isinstance(module, Linear4bit)]

    seconds: dict[type, list[float]] = {Linear4bit: [], lora.Linear4bit: []}
    for _ in range(REPEATS):
        for kind, times in seconds.items():
            for layer in layers:
                layer.__class__ = kind
            started = time.perf_counter()
            with policy.backbone.training(dropout=False):
                policy(batch).logprobs_BR.sum().backward()
            times.append(time.perf_counter() - started)
    ours, theirs = (statistics.median(times[1:]) for times in seconds.values())
    print(
        f"{ROWS} rows of {PROMPT + RESPONSE} tokens, forward and backward, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"ours {ours:.2f} s, PEFT's {theirs:.2f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
