"""Base, SFT and policy answer the same prompts: their answers, scores and distance to the reference.

Axes: B prompts.
"""

from dataclasses import dataclass

from torch import Tensor

from pipeline.batch import Pairs, Rollout
from pipeline.data.examples import Prompt
from pipeline.data.tokenization import ChatTokenizer
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling, generate
from pipeline.samples import answers
from pipeline.statistics import win_rate


@dataclass(frozen=True)
class Answers:
    """One role's answers and what is said of them; one number per prompt.

    kl_B: k1 to the reference summed over the answer, in nats.
    """

    rollout: Rollout
    texts: list[str]
    scores: dict[str, Tensor]
    kl_B: Tensor


def answer(
    policy: Policy,
    reference: Policy,
    scorers: dict[str, RewardModel],
    prompts: list[Prompt],
    sampling: Sampling,
    tokenizer: ChatTokenizer,
    microbatch_size: int,
) -> Answers:
    """One sampled answer of `policy` to each prompt; the noise is the same whoever answers."""
    rollout = generate(policy, prompts, sampling, step=0)
    log_ratio_BR = policy.logprobs_all(rollout, microbatch_size) - reference.logprobs_all(rollout, microbatch_size)
    ended = rollout.ended(tokenizer.end_id)
    scores = {name: model.score_all(ended, microbatch_size) for name, model in scorers.items()}
    return Answers(rollout, answers(rollout, tokenizer), scores, log_ratio_BR.sum(1))


def gaps(model: RewardModel, pairs: Pairs, microbatch_size: int) -> Tensor:
    """Score of the chosen less that of the rejected answer, without gradient; [B]."""
    return model.score_all(pairs.chosen, microbatch_size) - model.score_all(pairs.rejected, microbatch_size)


def figures(role: Answers) -> dict[str, float]:
    """Means over the prompts, and the median length."""
    lengths_B = role.rollout.response_lengths_B.float()
    return {
        **{f"{name}_mean": float(scores_B.mean()) for name, scores_B in role.scores.items()},
        "kl_per_sequence_k1": float(role.kl_B.mean()),
        "kl_per_token_k1": float(role.kl_B.sum() / lengths_B.sum()),
        "length_mean": float(lengths_B.mean()),
        "length_median": float(lengths_B.median()),
        "end_token_rate": 1 - float(role.rollout.truncated_B.float().mean()),
    }


def wins(ours: Answers, theirs: Answers, resamples: int, seed: int) -> dict[str, dict[str, float]]:
    """Win rate of `ours` under each scorer, with its 95% interval."""
    rates = {name: win_rate(ours.scores[name], theirs.scores[name], resamples, seed) for name in ours.scores}
    return {f"win_rate_{name}": {"mean": rate.mean, "low": rate.low, "high": rate.high} for name, rate in rates.items()}


def side_by_side(found: dict[str, Answers], questions: list[str]) -> list[dict[str, float | str]]:
    """One row per prompt: each role's answer with its scores."""
    rows = []
    for index, question in enumerate(questions):
        row: dict[str, float | str] = {"prompt": question}
        for role, theirs in found.items():
            row[role] = theirs.texts[index]
            row |= {f"{role}_{name}": float(scores_B[index]) for name, scores_B in theirs.scores.items()}
        rows.append(row)
    return rows


def points(found: dict[str, Answers]) -> list[dict[str, float | str]]:
    """One row per answer, for plotting score against KL and length."""
    return [
        {
            "role": role,
            "prompt": index,
            **{name: float(scores_B[index]) for name, scores_B in theirs.scores.items()},
            "kl": float(theirs.kl_B[index]),
            "tokens": int(theirs.rollout.response_lengths_B[index]),
        }
        for role, theirs in found.items()
        for index in range(len(theirs.texts))
    ]
