"""Section `warmup`: CartPole, where it is known what learning looks like."""

from pydantic import model_validator

from pipeline.params.section import Section, param


class ReinforceParams(Section):
    """One step up the policy gradient per iteration."""

    lr: float = param("learning rate of the actor", 1e-2, gt=0, le=1)


class ClippedParams(Section):
    """Several clipped steps per iteration, with a critic."""

    lr: float = param("learning rate of actor and critic", 3e-3, gt=0, le=1)
    epochs: int = param("passes over the episodes of an iteration", 4, ge=1)
    minibatch_size: int = param("episodes per optimizer step; divides warmup.episodes", 4, ge=1)
    clip: float = param("the ratio of new to old policy is clipped to 1 -+ this", 0.2, gt=0, lt=1)
    lam: float = param("lambda of generalised advantage estimation", 0.95, ge=0, le=1)


class WarmupParams(Section):
    """Section `warmup`."""

    seeds: list[int] = param("every algorithm is trained once with each", [1, 2, 3], min_length=1)
    iterations: int = param("times round the loop: rollout, evaluate, update", 30, ge=1)
    episodes: int = param("episodes played side by side in an iteration", 16, ge=1)
    gamma: float = param(
        "discount per step: at 0.98 the far end of what counts is some 50 steps away", 0.98, gt=0, le=1
    )
    evaluation_episodes: int = param("episodes that say what was learnt, from starts never trained on", 100, ge=1)
    reinforce: ReinforceParams
    ppo: ClippedParams

    @model_validator(mode="after")
    def _minibatches_are_whole(self) -> "WarmupParams":
        size = self.ppo.minibatch_size
        if self.episodes % size:
            divisors = [d for d in range(1, self.episodes + 1) if self.episodes % d == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - size))
            raise ValueError(
                f"warmup.ppo.minibatch_size is {size} but must divide warmup.episodes {self.episodes}; try {nearest}."
            )
        return self
