"""What PPO and its relatives run with, made in one place: stage `ppo` trains it, `make diagnose` looks at the very same."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.algorithms import Algorithm, algorithm_of
from pipeline.classifier import Scorer
from pipeline.data.examples import Prompt, demonstrations
from pipeline.data.prepared import read_demonstrations
from pipeline.heads import ScalarHead
from pipeline.online import Log, Watch, train_online
from pipeline.opening import open_base
from pipeline.params.ppo import PPOParams
from pipeline.recovery import NO_RECOVERY, NoRecovery, Recovery
from pipeline.rewards import Rewards, find_functions
from pipeline.roles import Policy
from pipeline.rollout import Sampling, sampling_of
from pipeline.scorers import open_reward_model
from pipeline.stage import Stage
from pipeline.update import Optimizer, Rehearsal

SFT = Path("artifacts/sft")


@dataclass(frozen=True)
class Loop:
    """The roles on one backbone, and how they are used.

    reward_model: None where no term of `ppo.reward` asks for it.
    rehearsal: None with `ppo.ptx_coef` 0.
    """

    algorithm: Algorithm
    policy: Policy
    reference: Policy
    reward_model: Scorer | None
    rewards: Rewards
    rehearsal: Rehearsal | None
    sampling: Sampling
    microbatch_tokens: int

    def train(
        self,
        cfg: PPOParams,
        asked: Iterable[list[Prompt]],
        optimizer: Optimizer,
        log: Log,
        watch: Watch,
        recovery: Recovery | NoRecovery = NO_RECOVERY,
    ) -> None:
        """`train_online` over the prompts of each iteration."""
        train_online(
            self.policy,
            self.reference,
            self.rewards.by_minibatch(cfg.minibatch_size),
            asked,
            optimizer,
            self.algorithm,
            cfg,
            self.sampling,
            self.microbatch_tokens,
            log,
            watch,
            self.rehearsal,
            recovery,
        )


def open_loop(stage: Stage, cfg: PPOParams, questions: Iterable[Prompt]) -> Loop:
    """The loop over the stage's artifacts, before its first step.

    Args:
        questions: all that may ever be asked.

    Raises:
        DataError: a stage before this one has not run.
        BaseModelError: an artifact does not fit the base.
        ParameterError: a function of `ppo.reward` cannot be used.
    """
    runtime, tokenizer = stage.runtime, stage.tokenizer
    algorithm = algorithm_of(cfg)
    functions = find_functions(cfg.reward)  # before any weight is loaded
    backbone = open_base(stage)
    backbone.load_adapter("sft", stage.input(str(SFT)))
    backbone.load_adapter("policy", SFT)  # the policy starts as a copy of sft, so KL is 0 at step 0
    questions = list(questions)
    model = open_reward_model(stage, backbone, "reward", questions) if cfg.uses_reward_model else None
    value_head = ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device) if algorithm.critic_objective else None
    rehearsal = None
    if cfg.ptx_coef:
        shown, _ = demonstrations(read_demonstrations(stage.input("prepared/sft.jsonl")), tokenizer)
        rehearsal = Rehearsal(Policy(backbone, "policy", 1.0, runtime.logprob_chunk), shown, cfg.ptx_coef)
    return Loop(
        algorithm,
        Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head),
        Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk),
        model,
        Rewards(cfg.reward, functions, questions, tokenizer, model, runtime.microbatch_tokens),
        rehearsal,
        sampling_of(tokenizer, runtime, stage.seed),
        runtime.microbatch_tokens,
    )
