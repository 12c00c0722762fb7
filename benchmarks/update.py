"""Forward and backward of an update: tokens per second and peak memory, with each gain switched off in turn.

python -m benchmarks.update [ROWS PROMPT RESPONSE]        (alone on the machine for times; peaks do not mind)

SmolLM2-135M as the demo recipe holds it: NF4 with the dequantised weights kept, bfloat16, LoRA r=16 on all linears. Each
line is a process of its own. The peak is the resident set's above what it is with the model loaded: activations,
gradients and logits, of all rows at once where nothing else is said. `ratio` is against the first line.
"""

import pipeline  # isort: skip  (before torch: it says how its threads wait)

import sys
from typing import Any

from peft.tuners import lora
from torch import Tensor

import pipeline.blocks
from benchmarks.measuring import as_line, in_fresh_process, measured
from benchmarks.parts import embedded_policy, random_rows
from pipeline.batch import Sequences
from pipeline.heads import ScalarHead
from pipeline.lora import Linear4bit
from pipeline.objectives.offline import sft
from pipeline.objectives.terms import Terms
from pipeline.roles import Policy, PolicyOutput
from pipeline.tensors import masked_sum
from pipeline.update import accumulate

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "ppo, with a critic": {},
    "a quarter of the rows at a time": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "sdpa attention": {"attention": "sdpa"},
    "eager attention": {"attention": "eager"},
    "no base cache": {"base_cache": "off"},
    "compiled blocks": {"compile": "layers"},
    "transformers' blocks": {},
    "transformers' blocks, PEFT's LoRA layers": {},
    "plain PEFT: both, eager attention, all logits": {"attention": "eager"},
}
TRANSFORMERS, PEFTS = tuple(SETTINGS)[-3:], tuple(SETTINGS)[-2:]
REPEATS = 4


def open_policy(name: str) -> Policy:
    """The demo's policy, less what the setting takes away."""
    if name in TRANSFORMERS:
        pipeline.blocks.replace_forwards = lambda model: None
    policy = embedded_policy(**SETTINGS[name])
    for module in policy.backbone.causal.modules():
        if name in PEFTS and isinstance(module, Linear4bit):
            module.__class__ = lora.Linear4bit
    if name.startswith("ppo"):
        policy.value_head = ScalarHead(policy.backbone.hidden_size, std=0.1)
    return policy


def objective(output: PolicyOutput, rows: Sequences) -> Terms:
    """SFT's loss, and where there is a critic a loss of its values."""
    terms = sft(output.logprobs_BR, rows.response_mask_BR)
    if output.values_BR is None:
        return terms
    return Terms(terms.loss_sum + masked_sum(output.values_BR**2, rows.response_mask_BR), terms.sums)


def all_logits_at_once(policy: Policy, rows: Sequences) -> Tensor:
    """The loss as transformers computes it."""
    columns_T = rows.attention_mask_BT.cumsum(1) - 1
    answered_BT = rows.attention_mask_BT & (columns_T >= rows.prompt_lengths_B[:, None])
    labels_BT = rows.tokens_BT.masked_fill(~answered_BT, -100)
    return policy.backbone.causal(
        input_ids=rows.tokens_BT, attention_mask=rows.attention_mask_BT.long(), labels=labels_BT, use_cache=False
    ).loss


def update(name: str, rows: int, prompt: int, response: int) -> dict[str, float]:
    """Seconds and peak of one forward and backward."""
    policy, batch = open_policy(name), random_rows(rows, prompt, response)
    tokens = rows * (prompt + response) // (4 if name.startswith("a quarter") else 1)

    def work() -> None:
        policy.backbone.causal.zero_grad()
        with policy.backbone.training(dropout=False):
            if name.startswith("plain"):
                all_logits_at_once(policy, batch).backward()
            else:
                accumulate(policy, batch, objective, tokens)

    return measured(work, REPEATS)


def main() -> None:
    """Prints a line for each setting."""
    rows, prompt, response = map(int, sys.argv[1:]) if sys.argv[1:] else (16, 40, 24)
    first: dict[str, float] = {}
    for name in SETTINGS:
        found = in_fresh_process(update, name, rows, prompt, response)
        first = first or found
        ratios = {f"{key}_ratio": found[key] / first[key] for key in ("seconds", "peak_mib")}
        tokens_per_second = rows * (prompt + response) / found["seconds"]
        print(as_line(setting=name, tokens_per_second=tokens_per_second, **found, **ratios), flush=True)


if __name__ == "__main__":
    main()
