"""Section `ppo`: the reinforcement learning loop, whichever algorithm runs in it.

Where a description begins with names of algorithms, the others do not read the parameter.
"""

from typing import Literal

from pydantic import field_validator, model_validator

from pipeline.params.reward_terms import RewardModelTerm, RewardTerm
from pipeline.params.section import Section, param

LORA_LR = (1e-5, 1e-3)
GROUPED = ("rloo", "grpo")
READ_BY = {
    "dual_clip": (("ppo", "rloo", "grpo"), None),
    "value_backprop": (("ppo",), "full"),
    "critic_warmup": (("ppo",), 0),
    "baseline": (("reinforce",), "batch_mean"),
    "scale_by_std": (("grpo",), True),
    "kl_estimator": (("ppo", "reinforce", "rloo"), "k1"),
    "kl_loss_estimator": (("grpo",), "k2"),
    "gamma": (("ppo", "reinforce"), 1.0),
}
"""Parameters that someone may set in vain: who reads them, and the value at which they ask for nothing."""


class PPOParams(Section):
    """Section `ppo`."""

    algorithm: Literal["ppo", "reinforce", "rloo", "grpo"] = param(
        "how advantages are made and what is minimised; only ppo has a critic", "ppo"
    )
    iterations: int = param("times round the loop: rollout, evaluate, update", 12, ge=1)
    rollout_size: int = param(
        "answers sampled per iteration",
        64,
        ge=1,
        usual=(64, 256),
        why="fewer answers make advantages noisy, more make the data of an iteration stale",
    )
    minibatch_size: int = param("answers per optimizer step; divides rollout_size", 16, ge=1)
    group_size: int = param(
        "rloo, grpo: answers to each prompt; divides rollout_size",
        4,
        ge=2,
        usual=(4, 16),
        why="an answer is compared with the others to its prompt: few are a noisy yardstick, many leave few prompts",
    )
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
        "ppo, rloo, grpo: the policy ratio is clipped to 1 -+ this",
        0.2,
        gt=0,
        lt=1,
        usual=(0.1, 0.2),
        why="a wider clip lets one rollout move the policy too far",
    )
    dual_clip: float | None = param(
        "ppo, rloo, grpo: for negative advantages the loss is at most this times -advantage; null for off", None, gt=1
    )
    clip_value: float = param("ppo: new values are clipped to the old ones -+ this", 0.2, gt=0)
    vf_coef: float = param("ppo: weight of the value loss", 0.5, ge=0)
    value_backprop: Literal["full", "detached"] = param(
        "ppo; full: the value loss trains the shared backbone too", "full"
    )
    critic_warmup: int = param("ppo: first iterations that train the value head alone", 0, ge=0)
    baseline: Literal["batch_mean", "none"] = param(
        "reinforce: what is taken off the reward-to-go, its mean over the rollout or nothing", "batch_mean"
    )
    scale_by_std: bool = param(
        "grpo: advantages are divided by the standard deviation of their group (false: Dr. GRPO)", True
    )
    kl_coef: float = param(
        "beta: what a nat of KL to the SFT model costs",
        0.02,
        ge=0,
        usual=(0.01, 0.1),
        why="below, the reward model is exploited; above, the policy hardly moves",
    )
    kl_target: float | None = param(
        "nats per answer toward which kl_coef is adapted after each iteration; null for a fixed kl_coef", None, gt=0
    )
    kl_horizon: int = param(
        "answers in which kl_coef grows or falls by about a fifth at most; the field's 10000 is for far longer runs",
        200,
        ge=1,
    )
    kl_estimator: str = param("ppo, reinforce, rloo: k1 or k3, the per-token estimate of KL in the reward", "k1")
    kl_loss_estimator: str = param("grpo: k2 or k3, the per-token estimate of KL in the loss", "k2")
    ptx_coef: float = param(
        "weight of the SFT loss on demonstrations, mixed into every optimizer step (InstructGPT); 0 for off", 0.0, ge=0
    )
    stop_kl: float | None = param(
        "the rest of an update is skipped when the mean k3 between old and new policy exceeds this; null for never",
        0.1,
        gt=0,
    )
    gamma: float = param(
        "ppo, reinforce: discount per token",
        1.0,
        gt=0,
        le=1,
        usual=(1.0, 1.0),
        why="an answer is a finite episode with a reward at its end; a discount teaches brevity",
    )
    lam: float = param(
        "ppo: lambda of generalised advantage estimation",
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

    sampling_weights: Literal["adapter", "merged"] = param(
        "merged: while answers are sampled the adapter is added to the weights: faster, but in bfloat16 they are rounded, so that "
        "answers come from a policy that is not quite the one that learns",
        "adapter",
    )

    @property
    def answers_per_prompt(self) -> int:
        """How often each prompt is answered in an iteration."""
        return self.group_size if self.algorithm in GROUPED else 1

    @property
    def prompts_per_iteration(self) -> int:
        """How many different prompts an iteration asks."""
        return self.rollout_size // self.answers_per_prompt

    @property
    def notes(self) -> list[str]:
        """One sentence for each value that is without effect, or not meant for the chosen algorithm."""
        notes = [
            f"ppo.{key} is {getattr(self, key)} but {self.algorithm} does not read it; {' and '.join(readers)} would."
            for key, (readers, nothing) in READ_BY.items()
            if self.algorithm not in readers and getattr(self, key) != nothing
        ]
        if self.algorithm == "reinforce" and self.epochs > 1:
            notes.append(
                f"ppo.epochs is {self.epochs} but reinforce has no ratio that corrects for answers of an older policy; "
                "1 is usual."
            )
        answers = self.iterations * self.rollout_size
        if self.kl_target is not None and self.kl_horizon > answers:
            notes.append(
                f"ppo.kl_horizon is {self.kl_horizon} but the run has {answers} answers in all, in which kl_coef hardly "
                f"moves toward ppo.kl_target; try {max(1, answers // 3)}."
            )
        return notes

    def discount_notes(self, length: float) -> list[str]:
        """What gamma leaves of the score, told when the answers' median length is known."""
        if self.gamma == 1 or self.algorithm not in READ_BY["gamma"][0]:
            return []
        return [
            f"ppo.gamma is {self.gamma:g}: of the score {self.gamma**length:.0%} is left at the first token of an answer "
            f"of median length, {length:.0f} tokens; that teaches brevity, 1.0 does not."
        ]

    @field_validator("kl_estimator")
    @classmethod
    def _estimator_fits_a_reward(cls, estimator: str) -> str:
        if estimator == "k2":
            raise ValueError("is 'k2' but must be k1 or k3: k2 in the reward is no estimate of KL's gradient; use k1.")
        if estimator not in ("k1", "k3"):
            raise ValueError(f"is {estimator!r} but must be k1 or k3; use k1.")
        return estimator

    @field_validator("kl_loss_estimator")
    @classmethod
    def _estimator_fits_a_loss(cls, estimator: str) -> str:
        if estimator == "k1":
            raise ValueError("is 'k1' but must be k2 or k3: the gradient of k1 as a loss is 0 on average; use k2.")
        if estimator not in ("k2", "k3"):
            raise ValueError(f"is {estimator!r} but must be k2 or k3; use k2.")
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

    @model_validator(mode="after")
    def _rollouts_are_whole(self) -> "PPOParams":
        faults = []
        for key in ("minibatch_size", "group_size") if self.algorithm in GROUPED else ("minibatch_size",):
            size = getattr(self, key)
            if self.rollout_size % size:
                smallest = 2 if key == "group_size" else 1
                divisors = [d for d in range(smallest, self.rollout_size + 1) if self.rollout_size % d == 0]
                near = sorted(sorted(divisors, key=lambda d, size=size: abs(d - size))[:2])
                faults.append(
                    f"ppo.{key} is {size} but must divide ppo.rollout_size {self.rollout_size}; "
                    f"try {' or '.join(map(str, near))}."
                )
        if faults:
            raise ValueError(" ".join(faults))
        return self

    @property
    def uses_reward_model(self) -> bool:
        """A term is the reward model's score."""
        return any(isinstance(term, RewardModelTerm) for term in self.reward)
