"""CartPole-v1 as a source of batches: the environment, episodes as rows, two small networks, beat 1.

Axes: B episodes, R steps of an episode, O the four numbers of an observation, A the two actions. True in a mask = counts.
Index t = step t; observation t is the one BEFORE action t is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from torch import Generator, Tensor, nn

from pipeline.batch import Batch
from pipeline.randomness import derive_seed
from pipeline.roles import PolicyOutput
from pipeline.tensors import length_mask

OBSERVATION, HIDDEN, ACTIONS = 4, 64, 2
SOLVED = 475.0  # the mean return at which gymnasium counts CartPole-v1 as solved; 500 is all there is

Choose = Callable[[Tensor, Generator], Tensor]
"""Logits of the actions, noise -> one action each; [B, A] -> [B]."""


@dataclass(frozen=True)
class Episodes(Batch):
    """Episodes as rows, padded on the right; RLHF's `Rollout`.

    last_observations_BO: what there is to see AFTER the last step.
    terminated_B: True where the pole fell or the cart left; False where the time was up before that.
    """

    observations_BRO: Tensor
    actions_BR: Tensor
    rewards_BR: Tensor
    steps_B: Tensor
    terminated_B: Tensor
    last_observations_BO: Tensor

    @property
    def lengths_B(self) -> Tensor:
        """Steps of each episode."""
        return self.steps_B

    @property
    def num_terms(self) -> int:
        """Steps of all episodes."""
        return int(self.steps_B.sum())

    @property
    def mask_BR(self) -> Tensor:
        """True at steps that were played."""
        return length_mask(self.steps_B, self.actions_BR.shape[1])

    def _trimmed(self) -> Self:
        longest = int(self.steps_B.max())
        along_steps = [field.name for field in fields(self) if field.name.endswith(("_BR", "_BRO"))]
        return replace(self, **{name: getattr(self, name)[:, :longest] for name in along_steps})


class ActorCritic(nn.Module):
    """Two small networks. A language model's actor and critic share a backbone; these need none.

    The critic may be missing, as it is in RLHF with an algorithm that has no use for it.
    """

    device = torch.device("cpu")

    def __init__(self, seed: int, with_critic: bool):
        super().__init__()
        torch.manual_seed(derive_seed(seed, "weights"))
        self.actor = _network(ACTIONS)
        self.critic = _network(1) if with_critic else None

    def forward(self, episodes: Episodes) -> PolicyOutput:
        """Log-probabilities of the actions taken, and values; what stands at padding has no meaning."""
        logprobs_BRA = self.actor(episodes.observations_BRO).log_softmax(-1)
        logprobs_BR = logprobs_BRA.gather(-1, episodes.actions_BR[..., None]).squeeze(-1)
        return PolicyOutput(logprobs_BR, None if self.critic is None else self.values(episodes.observations_BRO))

    def values(self, observations: Tensor) -> Tensor:
        """What the critic expects from here on; [..., O] -> [...]."""
        return self.critic(observations).squeeze(-1)


def _network(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(OBSERVATION, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
    )


def cartpoles(count: int) -> VectorEnv:
    """`count` environments that step as one: numpy over all of them is as fast as one alone."""
    return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")


@torch.no_grad()
def rollout(policy: ActorCritic, envs: VectorEnv, seed: int, choose: Choose) -> Episodes:
    """Beat 1: one episode in each environment, until the last has ended. Start and noise are functions of `seed` alone."""
    generator = Generator().manual_seed(seed)
    observations_BO = torch.from_numpy(envs.reset(seed=seed)[0])
    running_B = torch.ones(envs.num_envs, dtype=torch.bool)
    terminated_B, last_observations_BO = ~running_B, observations_BO
    history: list[tuple[Tensor, ...]] = []
    while running_B.any():
        actions_B = choose(policy.actor(observations_BO), generator)
        after_BO, rewards_B, fell_B, time_up_B = map(torch.from_numpy, envs.step(actions_B.numpy())[:4])
        history.append((observations_BO, actions_B, torch.where(running_B, rewards_B, 0), running_B))
        last_observations_BO = torch.where(running_B[:, None], after_BO, last_observations_BO)
        terminated_B = terminated_B | (running_B & fell_B)
        # an environment whose episode has ended begins another by itself; running_B says that nobody counts it
        running_B = running_B & ~fell_B & ~time_up_B
        observations_BO = after_BO
    observations_BRO, actions_BR, rewards_BR, ran_BR = (torch.stack(column, 1) for column in zip(*history, strict=True))
    return Episodes(observations_BRO, actions_BR, rewards_BR, ran_BR.sum(1), terminated_B, last_observations_BO)


def sampled(logits_BA: Tensor, generator: Generator) -> Tensor:
    """Actions as the policy's probabilities have them: what it is trained as."""
    return torch.multinomial(logits_BA.softmax(-1), 1, generator=generator).squeeze(-1)


def greedy(logits_BA: Tensor, _: Generator) -> Tensor:
    """The likeliest actions."""
    return logits_BA.argmax(-1)


def returns(policy: ActorCritic, episodes: int, seed: int, choose: Choose) -> Tensor:
    """What each of `episodes` episodes pays, undiscounted: from 8 or so to 500; [B]."""
    return rollout(policy, cartpoles(episodes), seed, choose).rewards_BR.sum(1)
