"""What distinguishes one algorithm from another: how advantages are made, and what is minimised."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pipeline.advantages import gae
from pipeline.batch import Experience
from pipeline.objectives import online
from pipeline.objectives.terms import Terms
from pipeline.params.ppo import PPOParams
from pipeline.roles import PolicyOutput
from pipeline.tensors import masked_whiten


@dataclass(frozen=True)
class Algorithm:
    """advantages: (rewards_BR, values_BR, mask_BR) -> (advantages_BR, returns_BR).

    objective: what the update minimises; critic_objective: the same while the value head warms up alone.
    """

    advantages: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    objective: Callable[[PolicyOutput, Experience], Terms]
    critic_objective: Callable[[PolicyOutput, Experience], Terms]


def ppo(cfg: PPOParams) -> Algorithm:
    """Proximal policy optimisation (Schulman et al. 2017) with GAE and whitened advantages; returns are of unwhitened ones."""

    def advantages(rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor) -> tuple[Tensor, Tensor]:
        advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, cfg.gamma, cfg.lam)
        return masked_whiten(advantages_BR, mask_BR), returns_BR

    def value_terms(output: PolicyOutput, batch: Experience) -> Terms:
        return online.clipped_value(
            output.values_BR, batch.values_BR, batch.returns_BR, batch.response_mask_BR, cfg.clip_value
        )

    def policy_terms(output: PolicyOutput, batch: Experience) -> Terms:
        return online.clipped_surrogate(
            output.logprobs_BR,
            batch.old_logprobs_BR,
            batch.advantages_BR,
            batch.response_mask_BR,
            cfg.clip,
            batch.weights_BR,
            cfg.dual_clip,
        )

    return Algorithm(
        advantages,
        objective=lambda output, batch: online.ppo(
            policy_terms(output, batch), value_terms(output, batch), cfg.vf_coef
        ),
        critic_objective=lambda output, batch: online.critic_alone(value_terms(output, batch)),
    )
