"""Answers to the same prompts set side by side: their scores, distance to the reference, and who wins.

Axes: B prompts, R response tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.batch import Rollout
from pipeline.classifier import Scorer
from pipeline.data.examples import Prompt
from pipeline.data.tokenization import ChatTokenizer
from pipeline.rewards import Rewards, means
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate
from pipeline.samples import answers
from pipeline.statistics import distinct_n, length_controlled_rate, mean_rate, wins


@dataclass(frozen=True)
class Answers:
    """One answer to each prompt and what is said of it; float32, [B] each.

    scores: `reward`, what PPO is paid for, and other reward models by their names.
    terms: what the reward is the weighted sum of.
    """

    rollout: Rollout
    texts: list[str]
    scores: dict[str, Tensor]
    terms: dict[str, Tensor] = field(default_factory=dict)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens, the end token included."""
        return self.rollout.response_lengths_B


def answer(
    policy: Policy,
    rewards: Rewards,
    others: dict[str, Scorer],
    prompts: list[Prompt],
    sampling: Sampling,
    tokenizer: ChatTokenizer,
    microbatch_tokens: int,
) -> Answers:
    """One answer of `policy` to each prompt; the noise is the same whoever answers."""
    rollout = generate(policy, prompts, sampling, step=0)
    ended = rollout.ended(tokenizer.end_id)
    scores = {"reward": rewards(rollout)}
    scores |= {name: model.score_all(ended, microbatch_tokens) for name, model in others.items()}
    return Answers(rollout, answers(rollout, tokenizer), scores, dict(rewards.values))


def kl_per_answer(policy: Policy, reference: Policy, rollout: Rollout, microbatch_tokens: int) -> Tensor:
    """k1 to the reference, summed over the tokens of answers that `policy` sampled, in nats; [B]."""
    if policy == reference:
        return torch.zeros(len(rollout))
    log_ratio_BR = policy.logprobs_all(rollout, microbatch_tokens) - reference.logprobs_all(rollout, microbatch_tokens)
    return log_ratio_BR.sum(1)


def figures(found: Answers) -> dict[str, float]:
    """Means over the prompts, the median length, and the share of different words among all."""
    lengths_B = found.lengths_B.float()
    ids = [row[:length].tolist() for row, length in zip(found.rollout.response_ids_BR, found.lengths_B, strict=True)]
    return {
        **{f"{name}_mean": float(scores_B.mean()) for name, scores_B in found.scores.items()},
        **means(found.terms),
        "length_mean": float(lengths_B.mean()),
        "length_median": float(lengths_B.median()),
        "end_token_rate": 1 - float(found.rollout.truncated_B.float().mean()),
        "distinct_1": distinct_n(ids, 1),
        "distinct_2": distinct_n(ids, 2),
    }


def kl_figures(kl_B: Tensor, found: Answers) -> dict[str, float]:
    """Mean k1 per answer, and per token over all tokens."""
    return {
        "kl_per_sequence_k1": float(kl_B.mean()),
        "kl_per_token_k1": float(kl_B.sum() / found.lengths_B.sum()),
    }


def win_rates(ours: Answers, theirs: Answers, resamples: int, seed: int) -> dict[str, dict[str, float]]:
    """Win rate of `ours` under each scorer, as it is and at equal length, with 95% intervals."""
    extra_B = (ours.lengths_B - theirs.lengths_B).double().numpy()
    rates = {}
    for name in ours.scores:
        wins_B = wins(ours.scores[name], theirs.scores[name])
        rates[f"win_rate_{name}"] = mean_rate(wins_B, resamples, seed).as_dict()
        rates[f"win_rate_{name}_length_controlled"] = length_controlled_rate(wins_B, extra_B, resamples, seed).as_dict()
    return rates


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


def points(found: dict[str, Answers], kl: dict[str, Tensor]) -> list[dict[str, float | str]]:
    """One row per answer, for plotting score against KL and length."""
    return [
        {
            "role": role,
            "prompt": index,
            **{name: float(scores_B[index]) for name, scores_B in theirs.scores.items()},
            "kl": float(kl[role][index]),
            "tokens": int(theirs.lengths_B[index]),
        }
        for role, theirs in found.items()
        for index in range(len(theirs.texts))
    ]
