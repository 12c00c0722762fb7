"""Operations and bytes: what a pass costs a machine of known matmul rate and memory bandwidth. Pure arithmetic.

One shared backbone, LoRA on every linear layer of the blocks. Left out: attention scores (about 2% at the lengths of the recipes), norms,
activations, sampling, log-softmax.

A matrix of n weights costs 2n operations per token forward and 2n for the gradient of its input; only the adapters' own gradients cost
another 2n. Decoding reads every weight and the key-value cache once per step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What of a model costs anything.

    body, head, lora: weights of the blocks' linears, of the output matrix, of one adapter.
    kv_values: numbers per token in the key-value cache.
    bytes_per_body_weight: 2 in 16 bits; fewer where 4-bit weights are read as they are.
    """

    body: int
    head: int
    lora: int
    kv_values: int
    bytes_per_body_weight: float = 2.0


@dataclass(frozen=True)
class Rates:
    """flops: operations per second of a large 16-bit matrix product. bandwidth: bytes per second."""

    flops: float
    bandwidth: float


def forward_flops(shape: Shape, tokens: int, head_tokens: int) -> float:
    """Operations of one forward without an adapter; the head at `head_tokens` of the tokens."""
    return 2.0 * shape.body * tokens + 2.0 * shape.head * head_tokens


def backward_flops(shape: Shape, tokens: int, head_tokens: int) -> float:
    """Gradients of the inputs through frozen weights, and the adapters' forward and both gradients."""
    return forward_flops(shape, tokens, head_tokens) + 6.0 * shape.lora * tokens


def step_bytes(shape: Shape, rows: int, context: float) -> float:
    """What one decode step reads: all weights, and the cache of `context` tokens a row; the head and the cache in 16 bits."""
    return shape.bytes_per_body_weight * shape.body + 2.0 * shape.head + 2.0 * shape.kv_values * rows * context


def decode_step(shape: Shape, rates: Rates, rows: int, context: float) -> float:
    """Seconds of one decode step: reading or computing, whichever takes longer."""
    computing = forward_flops(shape, rows, rows) / rates.flops
    return max(computing, step_bytes(shape, rows, context) / rates.bandwidth)


def prefill(shape: Shape, rates: Rates, rows: int, prompt: int) -> float:
    """Seconds until the first new token of every row."""
    return forward_flops(shape, rows * prompt, rows) / rates.flops


def decoding(shape: Shape, rates: Rates, rows: int, prompt: int, response: int) -> float:
    """Seconds of the other tokens, at their mean context."""
    return (response - 1) * decode_step(shape, rates, rows, prompt + response / 2)
