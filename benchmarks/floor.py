"""The least time that a PPO iteration can take on a machine of known matmul rate and memory bandwidth; pure arithmetic.

What pipeline/planning/work.py leaves out makes it a lower bound.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.planning.work import Rates, Shape, backward_flops, decoding, forward_flops, prefill

ADAM_BYTES = (
    28  # per trained weight and step: weight, gradient and two moments read, all but the gradient written; float32
)


def shape_of(config: dict[str, Any], lora_r: int, bytes_per_body_weight: float = 2.0) -> Shape:
    """From config.json of a Llama, Mistral or Qwen2."""
    hidden, inner, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    head_size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head_size * config["num_attention_heads"], head_size * config["num_key_value_heads"]
    linears = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    linears += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return Shape(
        body=layers * sum(inward * outward for inward, outward in linears),
        head=config["vocab_size"] * hidden,
        lora=layers * lora_r * sum(inward + outward for inward, outward in linears),
        kv_values=2 * layers * keys,
        bytes_per_body_weight=bytes_per_body_weight,
    )


@dataclass(frozen=True)
class Beats:
    """Seconds of the three beats of an iteration."""

    rollout: float
    evaluate: float
    update: float

    @property
    def iteration(self) -> float:
        """All three."""
        return self.rollout + self.evaluate + self.update


def beats(shape: Shape, rates: Rates, rows: int, prompt: int, response: int, epochs: int) -> Beats:
    """The floor of one iteration.

    Evaluation is one forward, which no design can do without; one for each of policy,
    reference and reward model takes three times that.
    """
    rollout = prefill(shape, rates, rows, prompt) + decoding(shape, rates, rows, prompt, response)
    tokens, head_tokens = rows * (prompt + response), rows * response
    forward = forward_flops(shape, tokens, head_tokens) / rates.flops
    backward = backward_flops(shape, tokens, head_tokens) / rates.flops
    adam = ADAM_BYTES * shape.lora / rates.bandwidth
    return Beats(rollout, forward, epochs * (forward + backward + adam))
