"""What distinguishes one algorithm from another: how advantages are made, what is minimised, and where KL is paid.

Axes: B batch, R response tokens. True in a mask = counts, the end token included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipeline.advantages import gae, group_centered, group_normalized, leave_one_out, over_tokens, reward_to_go
from pipeline.batch import Experience
from pipeline.objectives import online
from pipeline.objectives.terms import Terms
from pipeline.params.ppo import PPOParams
from pipeline.roles import PolicyOutput
from pipeline.tensors import masked_center, masked_scale, masked_whiten

Objective = Callable[[PolicyOutput, Experience], Terms]


@dataclass(frozen=True)
class Estimate:
    """What `Algorithm.advantages` makes; 0 at padding, float32, [B, R].

    advantages_BR: what the policy climbs.
    raw_BR: the same before whitening or scaling, for people and health rules.
    returns_BR: what the critic learns; without a critic, the rewards that raw_BR are made of.
    """

    advantages_BR: Tensor
    raw_BR: Tensor
    returns_BR: Tensor


@dataclass(frozen=True)
class Algorithm:
    """advantages: (rewards_BR, values_BR, mask_BR) -> Estimate.

    kl_coef: what a nat of KL to the reference costs.
    main_objective: what the update minimises, but for a KL loss.
    critic_objective: the same while the value head warms up alone; None: there is no critic.
    kl_loss: KL to the reference as a loss; None: KL is taken off the reward.
    """

    kl_coef: float
    advantages: Callable[[Tensor, Tensor, Tensor], Estimate]
    main_objective: Objective
    critic_objective: Objective | None = None
    kl_loss: Objective | None = None

    @property
    def reward_kl_coef(self) -> float:
        """What a nat takes off the reward."""
        return self.kl_coef if self.kl_loss is None else 0.0

    def objective(self, output: PolicyOutput, batch: Experience) -> Terms:
        """What the update minimises."""
        terms = self.main_objective(output, batch)
        return terms if self.kl_loss is None else online.with_kl(terms, self.kl_loss(output, batch), self.kl_coef)


def ppo(cfg: PPOParams) -> Algorithm:
    """Proximal policy optimisation (Schulman et al. 2017): GAE, whitened; returns are of unwhitened advantages."""

    def advantages(rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor) -> Estimate:
        raw_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, cfg.gamma, cfg.lam)
        return Estimate(masked_whiten(raw_BR, mask_BR), raw_BR, returns_BR)

    def value_terms(output: PolicyOutput, batch: Experience) -> Terms:
        return online.clipped_value(
            output.values_BR, batch.values_BR, batch.returns_BR, batch.response_mask_BR, cfg.clip_value
        )

    return Algorithm(
        cfg.kl_coef,
        advantages,
        lambda output, batch: online.ppo(_clipped(cfg, output, batch), value_terms(output, batch), cfg.vf_coef),
        critic_objective=lambda output, batch: online.critic_alone(value_terms(output, batch)),
    )


def reinforce(cfg: PPOParams) -> Algorithm:
    """REINFORCE (Williams 1992): reward-to-go less its mean over the rollout, or as it is; scaled to unit size."""
    centered = cfg.baseline == "batch_mean"

    def advantages(rewards_BR: Tensor, _: Tensor, mask_BR: Tensor) -> Estimate:
        returns_BR = reward_to_go(rewards_BR, mask_BR, cfg.gamma)
        raw_BR = masked_center(returns_BR, mask_BR) if centered else returns_BR
        return Estimate(masked_scale(raw_BR, mask_BR), raw_BR, returns_BR)

    def objective(output: PolicyOutput, batch: Experience) -> Terms:
        mask_BR = batch.response_mask_BR
        policy = online.policy_gradient(output.logprobs_BR, batch.advantages_BR, mask_BR, batch.weights_BR)
        return online.actor_alone(policy, online.movement(output.logprobs_BR, batch.old_logprobs_BR, mask_BR))

    return Algorithm(cfg.kl_coef, advantages, objective)


def rloo(cfg: PPOParams) -> Algorithm:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): an answer is one action, paid score less KL; PPO's clipped loss."""
    advantages = partial(_grouped, cfg.group_size, leave_one_out, leave_one_out)
    return Algorithm(cfg.kl_coef, advantages, partial(_clipped_alone, cfg))


def grpo(cfg: PPOParams) -> Algorithm:
    """Group-relative policy optimisation (Shao et al. 2024): the score alone is normalised, KL is a loss of its own."""
    scale = group_normalized if cfg.scale_by_std else group_centered

    def kl_loss(output: PolicyOutput, batch: Experience) -> Terms:
        return online.kl_loss(
            output.logprobs_BR, batch.ref_logprobs_BR, batch.response_mask_BR, cfg.kl_loss_estimator, batch.weights_BR
        )

    advantages = partial(_grouped, cfg.group_size, scale, group_centered)
    return Algorithm(cfg.kl_coef, advantages, partial(_clipped_alone, cfg), kl_loss=kl_loss)


ALGORITHMS: dict[str, Callable[[PPOParams], Algorithm]] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
}


def algorithm_of(cfg: PPOParams) -> Algorithm:
    """The one that `ppo.algorithm` names."""
    return ALGORITHMS[cfg.algorithm](cfg)


def _grouped(
    group_size: int,
    estimate: Callable[[Tensor], Tensor],
    raw: Callable[[Tensor], Tensor],
    rewards_BR: Tensor,
    _: Tensor,
    mask_BR: Tensor,
) -> Estimate:
    """Advantages of whole answers among those to the same prompt, at each of their tokens."""
    return Estimate(
        over_tokens(rewards_BR, mask_BR, group_size, estimate),
        over_tokens(rewards_BR, mask_BR, group_size, raw),
        over_tokens(rewards_BR, mask_BR, group_size, lambda rewards_PG: rewards_PG),
    )


def _clipped(cfg: PPOParams, output: PolicyOutput, batch: Experience) -> Terms:
    return online.clipped_surrogate(
        output.logprobs_BR,
        batch.old_logprobs_BR,
        batch.advantages_BR,
        batch.response_mask_BR,
        cfg.clip,
        batch.weights_BR,
        cfg.dual_clip,
    )


def _clipped_alone(cfg: PPOParams, output: PolicyOutput, batch: Experience) -> Terms:
    return online.actor_alone(_clipped(cfg, output, batch))
