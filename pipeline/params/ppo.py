"""Section `ppo`: the reinforcement learning loop."""

from typing import Literal

from pydantic import field_validator, model_validator

from pipeline.params.reward_terms import RewardModelTerm, RewardTerm
from pipeline.params.section import Section, param

LORA_LR = (1e-5, 1e-3)


class PPOParams(Section):
    """Section `ppo`."""

    iterations: int = param("times round the loop: rollout, evaluate, update", 12, ge=1)
    rollout_size: int = param(
        "answers sampled per iteration",
        64,
        ge=1,
        usual=(64, 256),
        why="fewer answers make advantages noisy, more make the data of an iteration stale",
    )
    minibatch_size: int = param("answers per optimizer step; divides rollout_size", 16, ge=1)
    epochs: int = param(
        "passes over each rollout",
        2,
        ge=1,
        usual=(1, 4),
        why="more epochs move the policy further from the one that sampled",
    )
    lr: float = param(
        "learning rate of the policy adapter",
        3e-4,
        ge=0,
        le=1,
        usual=LORA_LR,
        why="that is the range for LoRA; the 1e-6 to 5e-6 found in papers is for full fine-tuning",
    )
    value_lr: float = param("learning rate of the value head", 1e-3, ge=0, le=1)
    warmup_steps: int = param("optimizer steps in which the learning rates rise; constant after", 4, ge=0)
    max_grad_norm: float = param("gradient norm limit, for the adapter and for the value head apart", 1.0, gt=0)
    clip: float = param(
        "the policy ratio is clipped to 1 -+ this",
        0.2,
        gt=0,
        lt=1,
        usual=(0.1, 0.2),
        why="a wider clip lets one rollout move the policy too far",
    )
    dual_clip: float | None = param(
        "for negative advantages the loss is at most this times -advantage; null for off", None, gt=1
    )
    clip_value: float = param("new values are clipped to the old ones -+ this", 0.2, gt=0)
    vf_coef: float = param("weight of the value loss", 0.5, ge=0)
    value_backprop: Literal["full", "detached"] = param("full: the value loss trains the shared backbone too", "full")
    critic_warmup: int = param("first iterations that train the value head alone", 0, ge=0)
    kl_coef: float = param(
        "beta: what a nat of KL to the SFT model costs",
        0.02,
        ge=0,
        usual=(0.01, 0.1),
        why="below, the reward model is exploited; above, the policy hardly moves",
    )
    kl_estimator: str = param("k1 or k3, the per-token estimate of KL in the reward", "k1")
    stop_kl: float | None = param(
        "the rest of an update is skipped when the mean k3 between old and new policy exceeds this; null for never",
        0.1,
        gt=0,
    )
    gamma: float = param(
        "discount per token",
        1.0,
        gt=0,
        le=1,
        usual=(1.0, 1.0),
        why="an answer is a finite episode with a reward at its end; a discount teaches brevity",
    )
    lam: float = param(
        "lambda of generalised advantage estimation",
        0.95,
        ge=0,
        le=1,
        usual=(0.9, 1.0),
        why="0.95 is the field's choice; lower leans on a critic that is still learning",
    )
    temperature: float = param(
        "sampling temperature; log-probabilities are of the tempered distribution",
        1.0,
        gt=0,
        usual=(0.7, 1.0),
        why="colder rollouts explore little, hotter ones ramble",
    )
    reward: list[RewardTerm] = param(
        "what an answer is paid for: the score is the sum of weight * value over these terms",
        [{"term": "reward_model", "weight": 1.0}],
    )
    normalize_scores: bool = param(
        "scores are taken relative to the mean and the standard deviation of all scores so far, before they are clipped",
        False,
    )
    score_clip: float = param("scores are clipped to -+ this", 10.0, gt=0)
    missing_eos_penalty: float = param("taken off the score of an answer that was cut", 1.0, ge=0)
    watch_every: int = param(
        "the development prompts are answered before the first iteration, after every so many, and after the last",
        2,
        ge=1,
    )
    keep: Literal["last", "best"] = param(
        "last: the policy after the last iteration; best: of the watched ones that with the highest reward on development prompts",
        "best",
    )
    keep_max_kl: float = param(
        "keep: best takes no policy that is further from the SFT model, in nats per answer on development prompts",
        15.0,
        gt=0,
    )
    old_logprobs: Literal["recompute", "rollout"] = param(
        "recompute: by the update's own forward, so that the ratio starts at 1; rollout: as sampled", "recompute"
    )

    @field_validator("kl_estimator")
    @classmethod
    def _estimator_fits_a_reward(cls, estimator: str) -> str:
        if estimator == "k2":
            raise ValueError("is 'k2' but must be k1 or k3: k2 in the reward is no estimate of KL's gradient; use k1.")
        if estimator not in ("k1", "k3"):
            raise ValueError(f"is {estimator!r} but must be k1 or k3; use k1.")
        return estimator

    @field_validator("reward")
    @classmethod
    def _terms_can_be_told_apart(cls, terms: list[RewardTerm]) -> list[RewardTerm]:
        if not terms:
            raise ValueError("is [] but must have a term; for example [{'term': 'reward_model', 'weight': 1.0}].")
        names = [term.name for term in terms]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ValueError(
                f"has {names.count(twice[0])} terms called {twice[0]} but each must have a name of its own: "
                "leave one out, or give the functions different names."
            )
        return terms

    @property
    def uses_reward_model(self) -> bool:
        """A term is the reward model's score."""
        return any(isinstance(term, RewardModelTerm) for term in self.reward)

    @model_validator(mode="after")
    def _minibatches_are_whole(self) -> "PPOParams":
        if self.rollout_size % self.minibatch_size:
            divisors = [d for d in range(1, self.rollout_size + 1) if self.rollout_size % d == 0]
            near = sorted(sorted(divisors, key=lambda d: abs(d - self.minibatch_size))[:2])
            raise ValueError(
                f"ppo.minibatch_size is {self.minibatch_size} but must divide ppo.rollout_size {self.rollout_size}; "
                f"try {' or '.join(map(str, near))}."
            )
        return self
