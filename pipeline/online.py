"""The online loop: rollout, evaluate, update."""

from collections.abc import Callable, Iterable

from torch import Tensor

from pipeline.algorithms import Algorithm
from pipeline.batch import Experience
from pipeline.data.examples import Prompt
from pipeline.evaluation import Score, evaluate, summarize, unchanged
from pipeline.params.ppo import PPOParams
from pipeline.randomness import derive_seed
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate
from pipeline.update import Optimizer, UpdatePlan, update

Log = Callable[[int, dict[str, float], Experience], None]
Watch = Callable[[int], None]


def train_online(
    policy: Policy,
    reference: Policy,
    score: Score,
    prompts: Iterable[list[Prompt]],
    optimizer: Optimizer,
    algorithm: Algorithm,
    cfg: PPOParams,
    sampling: Sampling,
    microbatch_size: int,
    log: Log,
    watch: Watch,
    normalize: Callable[[Tensor], Tensor] = unchanged,
) -> None:
    """PPO on one shared backbone: the policy samples, is scored, and is moved; the reference stays.

    `watch` is told, before the first iteration and after each, how many are done.
    """
    plan = UpdatePlan(cfg.epochs, cfg.minibatch_size, microbatch_size, cfg.stop_kl)
    watch(0)
    for step, prompts_B in enumerate(prompts):
        warming_up = step < cfg.critic_warmup
        policy.detach_values = warming_up or cfg.value_backprop == "detached"
        objective = algorithm.critic_objective if warming_up else algorithm.objective

        rollout = generate(policy, prompts_B, sampling, step)  # 1 rollout
        experience = evaluate(  # 2 evaluate
            rollout, policy, reference, score, algorithm, cfg, microbatch_size, normalize
        )
        with policy.backbone.training(dropout=False):
            stats = update(policy, optimizer, experience, objective, plan, derive_seed(sampling.seed, step))  # 3 update
        log(step, summarize(experience) | stats, experience)
        watch(step + 1)
