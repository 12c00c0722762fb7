"""The loop of RLHF where everybody knows the answer: CartPole. Read this before pipeline/online.py.

A cart carries a pole. At each step the policy pushes left or right and is paid 1, until the pole falls or 500 steps are
over. There is no language model, no reward model and no KL. The rest is what PPO on a language model is made of, and
advantages, objectives and update are the very same functions:

    RLHF                 here
    a prompt             where cart and pole start
    a response           an episode: one row of a batch; a mask says where it ends
    a token              a push
    the text so far      an observation: place and speed of the cart, angle and speed of the pole

Axes: B episodes, R their steps (response tokens). Index t = step t; value t is that of the state BEFORE push t.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.advantages import gae, reward_to_go
from pipeline.cartpole import ActorCritic, Episodes, cartpoles, rollout, sampled
from pipeline.objectives import online
from pipeline.objectives.terms import Terms
from pipeline.params.warmup import WarmupParams
from pipeline.randomness import derive_seed
from pipeline.roles import PolicyOutput
from pipeline.tensors import masked_scale, masked_whiten
from pipeline.update import Optimizer, ParameterGroup, UpdatePlan, constant_after_warmup, update

MAX_GRAD_NORM = 0.5
UNDIVIDED = 10**9  # a minibatch of episodes goes through the small networks at once
VF_COEF = 0.5  # of little weight here: actor and critic share nothing, and Adam undoes a factor
CLIP_VALUE = 10.0  # a fifth of the largest value, 1 / (1 - gamma) = 50, as 0.2 is a fifth of a score of 1


@dataclass(frozen=True)
class Experience(Episodes):
    """Episodes with what the update needs to know of them; without gradient."""

    old_logprobs_BR: Tensor
    values_BR: Tensor
    advantages_BR: Tensor
    returns_BR: Tensor


@dataclass(frozen=True)
class Method:
    """What distinguishes one algorithm from another.

    advantages: (rewards_BR, values_BR, mask_BR, bootstrap_B) -> (advantages_BR, returns_BR).
    objective: what the update minimises; plan: how often, and in what pieces.
    """

    advantages: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    objective: Callable[[PolicyOutput, Experience], Terms]
    plan: UpdatePlan
    with_critic: bool


def train(method: Method, cfg: WarmupParams, seed: int, log: Callable[[int, dict[str, float]], None]) -> ActorCritic:
    """The loop. In RLHF a fourth beat gives the new weights to the sampler; here policy and sampler are one."""
    policy, envs = ActorCritic(seed, method.with_critic), cartpoles(cfg.episodes)
    optimizer = _optimizer(policy, cfg.lr)
    for step in range(cfg.iterations):
        noise = derive_seed(seed, "training", step)
        episodes = rollout(policy, envs, noise, sampled)  # 1 rollout
        experience = evaluate(episodes, policy, method)  # 2 evaluate
        stats = update(policy, optimizer, experience, method.objective, method.plan, noise)  # 3 update
        log(step, summarize(experience) | stats)
    return policy


@torch.no_grad()
def evaluate(episodes: Episodes, policy: ActorCritic, method: Method) -> Experience:
    """Beat 2: what the policy thought when it acted, and how much better than expected each push was.

    Termination is not truncation. After a fall nothing more can be earned: the value there is 0. Where the time was up
    the pole still stands, and the critic says what would have come; without that, step 500 would look as bad as a fall.
    (RLHF's score judges the whole answer, also one that was cut: the value after the last token is always 0.)
    """
    output = policy(episodes)
    values_BR, bootstrap_B = torch.zeros_like(output.logprobs_BR), torch.zeros(len(episodes))
    if policy.critic is not None:
        values_BR = output.values_BR
        bootstrap_B = torch.where(episodes.terminated_B, 0, policy.values(episodes.last_observations_BO))
    advantages_BR, returns_BR = method.advantages(episodes.rewards_BR, values_BR, episodes.mask_BR, bootstrap_B)
    return Experience(
        **{field.name: getattr(episodes, field.name) for field in fields(Episodes)},
        old_logprobs_BR=output.logprobs_BR,
        values_BR=values_BR,
        advantages_BR=advantages_BR,
        returns_BR=returns_BR,
    )


def reinforce(cfg: WarmupParams) -> Method:
    """REINFORCE (Williams 1992): make each push likelier by as much as was earned after it, less the mean of all pushes.

    One step per rollout: the policy gradient holds only for the policy that played.
    """
    return _policy_gradient(cfg, masked_whiten)


def reinforce_without_baseline(cfg: WarmupParams) -> Method:
    """The same with nothing taken off: every push becomes likelier, the good ones by more."""
    return _policy_gradient(cfg, masked_scale)


def _policy_gradient(cfg: WarmupParams, scale: Callable[[Tensor, Tensor], Tensor]) -> Method:
    def advantages(rewards_BR: Tensor, _: Tensor, mask_BR: Tensor, bootstrap_B: Tensor) -> tuple[Tensor, Tensor]:
        returns_BR = reward_to_go(rewards_BR, mask_BR, cfg.gamma, bootstrap_B)
        return scale(returns_BR, mask_BR), returns_BR

    def objective(output: PolicyOutput, batch: Experience) -> Terms:
        policy = online.policy_gradient(output.logprobs_BR, batch.advantages_BR, batch.mask_BR)
        return online.actor_alone(policy)

    once = UpdatePlan(epochs=1, minibatch_size=cfg.episodes, microbatch_tokens=UNDIVIDED, stop_kl=None)
    return Method(advantages, objective, once, with_critic=False)


def ppo(cfg: WarmupParams) -> Method:
    """PPO (Schulman et al. 2017): a critic says what was to be expected, and the clip lets a rollout be used several times."""

    def advantages(
        rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, bootstrap_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, cfg.gamma, cfg.lam, bootstrap_B)
        return masked_whiten(advantages_BR, mask_BR), returns_BR

    def objective(output: PolicyOutput, batch: Experience) -> Terms:
        policy = online.clipped_surrogate(
            output.logprobs_BR, batch.old_logprobs_BR, batch.advantages_BR, batch.mask_BR, cfg.clip
        )
        value = online.clipped_value(output.values_BR, batch.values_BR, batch.returns_BR, batch.mask_BR, CLIP_VALUE)
        return online.ppo(policy, value, VF_COEF)

    plan = UpdatePlan(cfg.epochs, cfg.minibatch_size, microbatch_tokens=UNDIVIDED, stop_kl=None)
    return Method(advantages, objective, plan, with_critic=True)


METHODS: dict[str, Callable[[WarmupParams], Method]] = {
    "reinforce_without_baseline": reinforce_without_baseline,
    "reinforce": reinforce,
    "ppo": ppo,
}


def summarize(experience: Experience) -> dict[str, float]:
    """What is watched: the return, undiscounted; the share of episodes that no fall ended; how good the critic is."""
    mask_BR, returns_B = experience.mask_BR, experience.rewards_BR.sum(1)
    returns, values = experience.returns_BR[mask_BR], experience.values_BR[mask_BR]
    unexplained = float((returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8))
    return {
        "return_mean": float(returns_B.mean()),
        "return_min": float(returns_B.min()),
        "truncated": 1 - float(experience.terminated_B.float().mean()),
        "explained_variance": 1 - unexplained,
    }


def _optimizer(policy: ActorCritic, lr: float) -> Optimizer:
    groups = [ParameterGroup(name, list(network.parameters()), lr) for name, network in policy.named_children()]
    return Optimizer(groups, MAX_GRAD_NORM, constant_after_warmup(0))
