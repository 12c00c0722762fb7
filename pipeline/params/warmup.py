"""Section `warmup`: CartPole, where it is known what learning looks like."""

from pydantic import model_validator

from pipeline.params.section import Section, param


class WarmupParams(Section):
    """Section `warmup`. All algorithms play as many episodes, at one learning rate."""

    seeds: list[int] = param("every algorithm is trained once with each", [1, 2, 3], min_length=1)
    iterations: int = param("times round the loop: rollout, evaluate, update", 30, ge=1)
    episodes: int = param("episodes played side by side in an iteration", 16, ge=1)
    gamma: float = param("discount per step: at 0.98 what is 50 steps away counts a third", 0.98, gt=0, le=1)
    lr: float = param("learning rate of actor and critic", 5e-3, gt=0, le=1)
    epochs: int = param("ppo: passes over the episodes of an iteration", 4, ge=1)
    minibatch_size: int = param("ppo: episodes per optimizer step; divides warmup.episodes", 4, ge=1)
    clip: float = param("ppo: the ratio of new to old policy is clipped to 1 -+ this", 0.2, gt=0, lt=1)
    lam: float = param("ppo: lambda of generalised advantage estimation", 0.95, ge=0, le=1)
    evaluation_episodes: int = param("episodes that say what was learnt, from starts never trained on", 100, ge=1)

    @model_validator(mode="after")
    def _minibatches_are_whole(self) -> "WarmupParams":
        if self.episodes % self.minibatch_size:
            divisors = [size for size in range(1, self.episodes + 1) if self.episodes % size == 0]
            nearest = min(divisors, key=lambda size: abs(size - self.minibatch_size))
            raise ValueError(
                f"warmup.minibatch_size is {self.minibatch_size} but must divide warmup.episodes {self.episodes}; "
                f"try {nearest}."
            )
        return self
