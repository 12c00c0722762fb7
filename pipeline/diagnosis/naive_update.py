"""The losses and gradients of a minibatch, computed a second time: row by row, token by token, at the weights that its step started from."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.batch import Sequences
from pipeline.diagnosis import naive_math
from pipeline.diagnosis.naive_math import Scalar, Token
from pipeline.diagnosis.naive_model import Adapter, Head, answer_pass
from pipeline.diagnosis.recording import Heard, Step, Weights
from pipeline.diagnosis.truth import Rows, Truth
from pipeline.params.ppo import PPOParams

Term = Callable[[Token], Scalar]


def rows_of(batches: Iterable[Sequences]) -> Rows:
    """(prompt, answer) of every row, in their order."""
    rows = []
    for batch in batches:
        for row in range(len(batch)):
            start, length = int(batch.prompt_lengths_B[row]), int(batch.response_lengths_B[row])
            ids = batch.tokens_BT[row, : start + length].tolist()
            rows.append((ids[:start], ids[start:]))
    return rows


def rows_heard(heard: list[Heard]) -> Rows:
    """The rows of some micro-batches."""
    return rows_of(call.batch for call in heard)


def tokens_heard(call: Heard) -> Iterator[list[Token]]:
    """What the losses read of each row's tokens, all of it as the loop had it."""
    batch = call.batch
    for row, length in enumerate(batch.response_lengths_B.tolist()):
        columns = (
            call.logprobs_BR,
            batch.values_BR if call.values_BR is None else call.values_BR,
            batch.old_logprobs_BR,
            batch.values_BR,
            batch.ref_logprobs_BR,
            batch.advantages_BR,
            batch.returns_BR,
            batch.weights_BR,
        )
        yield [Token(*numbers) for numbers in zip(*(column[row, :length].tolist() for column in columns), strict=True)]


def loss_terms(cfg: PPOParams) -> dict[str, tuple[float, Term]]:
    """The algorithm's losses: weight and one token's term of each."""
    if cfg.algorithm == "reinforce":
        return {"policy_loss": (1.0, naive_math.policy_gradient)}
    policy: dict[str, tuple[float, Term]] = {
        "policy_loss": (1.0, lambda token: naive_math.surrogate(token, cfg.clip, cfg.dual_clip))
    }
    if cfg.algorithm == "ppo":
        return policy | {"value_loss": (cfg.vf_coef, lambda token: naive_math.value_error(token, cfg.clip_value))}
    if cfg.algorithm == "grpo":
        return policy | {"kl_loss": (cfg.kl_coef, lambda token: naive_math.kl_loss(token, cfg.kl_loss_estimator))}
    return policy


def loss(token: Token, cfg: PPOParams) -> Scalar:
    """One token's term of the whole loss."""
    return sum(weight * term(token) for weight, term in loss_terms(cfg).values())


@dataclass(frozen=True)
class Recomputed:
    """Of one minibatch; gradients by the names that `Weights.named` gives."""

    logprobs: list[list[float]]
    values: list[list[float]]
    gradients: dict[str, Tensor]


def recompute(step: Step, truth: Truth, cfg: PPOParams) -> Recomputed:
    """Forward and backward of one minibatch, row by row, at the weights that the step started from."""
    weights = _tracked(step.before)
    leaves = weights.named()
    gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    result = Recomputed([], [], gradients)
    of_rows = [tokens for call in step.heard for tokens in tokens_heard(call)]
    total = sum(map(len, of_rows))
    for (prompt, answer), tokens in zip(rows_heard(step.heard), of_rows, strict=True):
        row = answer_pass(truth.causal, weights.adapter, prompt, answer, cfg.temperature)
        states_RH = row.states_RH.detach() if cfg.value_backprop == "detached" else row.states_RH
        values_R = torch.zeros_like(row.logprobs_R) if weights.head is None else weights.head(states_RH)
        result.logprobs.append(row.logprobs_R.tolist())
        result.values.append(values_R.tolist())
        row_loss = torch.zeros((), dtype=torch.float64)
        for token, logprob, value in zip(tokens, row.logprobs_R, values_R, strict=True):
            by_logprob, by_value = _slopes(token, cfg)
            row_loss = row_loss + (by_logprob * logprob + by_value * value) / total
        _add_gradients(gradients, leaves, row_loss)
    shown = rows_of(step.rehearsed)
    total = sum(len(answer) for _, answer in shown)
    for prompt, answer in shown:  # InstructGPT's ptx: the SFT loss, per token, at temperature 1
        row = answer_pass(truth.causal, weights.adapter, prompt, answer, temperature=1.0)
        _add_gradients(gradients, leaves, -cfg.ptx_coef * row.logprobs_R.double().sum() / total)
    return result


def _slopes(token: Token, cfg: PPOParams) -> tuple[float, float]:
    """What one token's loss changes by with its log-probability and its value, where the loop had them.

    There, and not at the second computation's own numbers: near a clip, rounding would decide which branch counts.
    """
    logprob = torch.tensor(token.logprob, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(token.value, dtype=torch.float64, requires_grad=True)
    term = loss(replace(token, logprob=logprob, value=value), cfg)
    if not isinstance(term, Tensor):  # both losses are clipped
        return 0.0, 0.0
    by_logprob, by_value = torch.autograd.grad(term, (logprob, value), allow_unused=True, materialize_grads=True)
    return float(by_logprob), float(by_value)


def _add_gradients(gradients: dict[str, Tensor], leaves: dict[str, Tensor], row_loss: Tensor) -> None:
    found = torch.autograd.grad(row_loss, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            gradients[name] += gradient


def _tracked(weights: Weights) -> Weights:
    """The same weights, asking for gradients."""

    def asking(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    adapter: Adapter = {
        name: replace(pair, a_RI=asking(pair.a_RI), b_OR=asking(pair.b_OR)) for name, pair in weights.adapter.items()
    }
    head = weights.head
    return Weights(adapter, None if head is None else Head(asking(head.weight_H), asking(head.bias)))
