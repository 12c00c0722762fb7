"""Beat 2: a rollout -> experience: log-probabilities, values, scores, KL, rewards, advantages.

Axes: B batch, R response tokens. True in a mask = counts, the end token included.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from pipeline.algorithms import Algorithm
from pipeline.batch import Batch, Experience, Rollout, Sequences, map_rows
from pipeline.errors import TrainingError
from pipeline.moments import RawScores, ScoreNormalizer
from pipeline.objectives.kl import IN_REWARD, k1, k3
from pipeline.params.ppo import PPOParams
from pipeline.roles import Policy
from pipeline.statistics import distinct_n
from pipeline.tensors import masked_mean, safe_exp

UNCHANGED = RawScores()
WEIGHT_LIMIT = 2.0  # a token that the sampler thought unlikely counts at most this often

Score = Callable[[Rollout], Tensor]
"""Answers, all rows at once -> one number each; float32 on the CPU, [B]."""


def score_normalizer(cfg: PPOParams) -> ScoreNormalizer | RawScores:
    """What is done to raw scores before they are clipped."""
    return ScoreNormalizer() if cfg.normalize_scores else RawScores()


def evaluate(
    rollout: Rollout,
    policy: Policy,
    reference: Policy,
    score: Score,
    algorithm: Algorithm,
    cfg: PPOParams,
    microbatch_tokens: int,
    normalize: ScoreNormalizer | RawScores = UNCHANGED,
) -> Experience:
    """Everything that the update needs to know of a rollout.

    Policy and reference are scored in passes of the same shape, and of the shape that the first epoch of the update
    uses: the log-ratio to the reference is exactly 0 while the two have equal weights, and the ratio of the first
    update is exactly 1.

    Args:
        normalize: raw scores -> those that are clipped and learnt from; the experience keeps the raw ones.

    Raises:
        TrainingError: a log-probability, value or score is not finite.
    """
    rollout = rollout.answered()
    mask_BR = rollout.response_mask_BR

    def by_minibatch(function: Callable[[Batch], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return map_rows(function, rollout, microbatch_tokens, cfg.minibatch_size)

    with policy.backbone.inference():
        old_logprobs_BR, values_BR, entropies_BR = by_minibatch(lambda batch: _policy_pass(policy, batch))
        (ref_logprobs_BR,) = by_minibatch(lambda batch: (reference(batch).logprobs_BR,))
        scores_B = score(rollout)
    if cfg.old_logprobs == "rollout":
        old_logprobs_BR = rollout.behaviour_logprobs_BR
        weights_BR = torch.ones_like(old_logprobs_BR)
    else:
        weights_BR = safe_exp(old_logprobs_BR - rollout.behaviour_logprobs_BR).clamp(max=WEIGHT_LIMIT)
    for name, value in {
        "log-probability of the policy": old_logprobs_BR,
        "log-probability of the sampler": rollout.behaviour_logprobs_BR,
        "log-probability of the reference": ref_logprobs_BR,
        "value": values_BR,
        "score": scores_B,
    }.items():
        if not torch.isfinite(value).all():
            raise TrainingError(
                f"A {name} is not finite: nothing is learnt from it; lower ppo.lr, or look at the model that gave it."
            )
    rewards_BR = token_rewards(
        scores=shaped_scores(normalize(scores_B), rollout.truncated_B, cfg.score_clip, cfg.missing_eos_penalty),
        log_ratio_BR=torch.where(mask_BR, old_logprobs_BR - ref_logprobs_BR, 0),
        mask_BR=mask_BR,
        kl_coef=algorithm.reward_kl_coef,
        estimator=cfg.kl_estimator,
    )
    estimate = algorithm.advantages(rewards_BR, values_BR, mask_BR)
    return Experience(
        **{field.name: getattr(rollout, field.name) for field in fields(Rollout)},
        old_logprobs_BR=old_logprobs_BR,
        ref_logprobs_BR=ref_logprobs_BR,
        entropies_BR=entropies_BR,
        values_BR=values_BR,
        scores_B=scores_B,
        rewards_BR=rewards_BR,
        advantages_BR=estimate.advantages_BR,
        raw_advantages_BR=estimate.raw_BR,
        returns_BR=estimate.returns_BR,
        weights_BR=weights_BR,
    )


def shaped_scores(scores_B: Tensor, truncated_B: Tensor, clip: float, missing_eos_penalty: float) -> Tensor:
    """Clipped scores, less the penalty where the answer was cut; [B]."""
    return scores_B.clamp(-clip, clip) - missing_eos_penalty * truncated_B.to(scores_B)


def token_rewards(scores: Tensor, log_ratio_BR: Tensor, mask_BR: Tensor, kl_coef: float, estimator: str) -> Tensor:
    """-kl_coef * kl at each token, plus the score at the last one: the end token, or the last one generated if cut; [B, R].

    A row without tokens has no reward.
    """
    kl_BR = torch.where(mask_BR, IN_REWARD[estimator](log_ratio_BR), 0)
    lengths_B1 = mask_BR.sum(1, keepdim=True)
    terminal_B1 = torch.where(lengths_B1 > 0, scores[:, None].to(kl_BR), 0)
    return (-kl_coef * kl_BR).scatter_add(1, (lengths_B1 - 1).clamp(min=0), terminal_B1)


def summarize(experience: Experience) -> dict[str, float]:
    """What is watched in RL, one number each; raw scores and raw advantages, before whitening."""
    mask_BR = experience.response_mask_BR
    log_ratio_BR = torch.where(mask_BR, experience.old_logprobs_BR - experience.ref_logprobs_BR, 0)
    gap_BR = torch.where(mask_BR, experience.old_logprobs_BR - experience.behaviour_logprobs_BR, 0)
    raw_advantages = experience.raw_advantages_BR[mask_BR]
    lengths = experience.response_lengths_B.float()
    scores = experience.scores_B
    answers = [ids[:length].tolist() for ids, length in zip(experience.response_ids_BR, lengths.int(), strict=True)]
    end_token_only_B = (experience.response_lengths_B == 1) & ~experience.truncated_B
    idle_B = (experience.advantages_BR == 0).all(1)
    return {
        "score_mean": float(scores.mean()),
        "score_std": float(scores.std(correction=0)),
        "score_p10": float(scores.quantile(0.1)),
        "score_p90": float(scores.quantile(0.9)),
        "reward_mean": float(experience.rewards_BR.sum(1).mean()),
        "kl_per_sequence_k1": float(k1(log_ratio_BR).sum(1).mean()),
        "kl_per_token_k1": float(masked_mean(k1(log_ratio_BR), mask_BR)),
        "kl_per_token_k3": float(masked_mean(k3(log_ratio_BR), mask_BR)),
        "entropy": float(masked_mean(experience.entropies_BR, mask_BR)),
        "advantage_mean": float(raw_advantages.mean()),
        "advantage_std": float(raw_advantages.std(correction=0)),
        "advantage_positive_share": float((raw_advantages > 0).float().mean()),
        "advantages_without_spread": float(bool((raw_advantages == raw_advantages[0]).all())),
        "answers_without_advantage": float(idle_B.float().mean()),
        "length_mean": float(lengths.mean()),
        "length_p10": float(lengths.quantile(0.1)),
        "length_p90": float(lengths.quantile(0.9)),
        "end_token_rate": 1 - float(experience.truncated_B.float().mean()),
        "end_token_only_rate": float(end_token_only_B.float().mean()),
        "distinct_2": distinct_n(answers, 2),
        "sampler_gap_max": float(gap_BR.abs().max()),
    }


def summarize_critic(experience: Experience) -> dict[str, float]:
    """How much of the returns the critic knew before: 1 is all, 0 is no more than their mean tells."""
    returns, values = (x_BR[experience.response_mask_BR] for x_BR in (experience.returns_BR, experience.values_BR))
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)
    return {"explained_variance": 1 - float(unexplained)}


def _policy_pass(policy: Policy, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    output, entropies_BR = policy.observe(batch)
    values_BR = torch.zeros_like(output.logprobs_BR) if output.values_BR is None else output.values_BR
    return output.logprobs_BR, values_BR, entropies_BR
