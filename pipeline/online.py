"""The online loop: rollout, evaluate, update."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from pipeline.algorithms import Algorithm
from pipeline.batch import Experience
from pipeline.data.enough import refuse_few_prompts
from pipeline.data.examples import Prompt, prompt_batches
from pipeline.evaluation import Score, evaluate, score_normalizer, summarize, summarize_critic
from pipeline.kl_control import KLControl
from pipeline.params.ppo import PPOParams
from pipeline.place import Place
from pipeline.progress import doing
from pipeline.randomness import derive_seed
from pipeline.recovery import NO_RECOVERY, NoRecovery, Recovery
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate
from pipeline.update import Figures, Optimizer, ParameterGroup, Rehearsal, UpdatePlan, constant_after_warmup, update

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
    microbatch_tokens: int,
    log: Log,
    watch: Watch,
    rehearsal: Rehearsal | None = None,
    recovery: Recovery | NoRecovery = NO_RECOVERY,
) -> None:
    """PPO, REINFORCE, RLOO and GRPO on one shared backbone: the policy samples, is scored, and is moved; the reference stays.

    `watch` is told, before the first iteration and after each, how many are done. `recovery` is asked where a process
    before has got to, and told of each rollout, optimizer step and iteration.
    """
    plan = UpdatePlan(cfg.epochs, cfg.minibatch_size, microbatch_tokens, cfg.stop_kl)
    sampling = replace(sampling, samples=cfg.answers_per_prompt, weights=cfg.sampling_weights)
    normalize = score_normalizer(cfg)
    place = Place(KLControl(cfg.kl_coef, cfg.kl_target, cfg.kl_horizon))
    recovery.resume(optimizer=optimizer, place=place, normalize=normalize)

    def stepped(taken: tuple[Figures, ...]) -> None:
        place.taken = taken
        recovery.reached(str(place))

    watch(place.iteration)
    for step, prompts_P in enumerate(islice(prompts, place.iteration, None), place.iteration):
        warming_up = algorithm.critic_objective is not None and step < cfg.critic_warmup
        policy.detach_values = warming_up or cfg.value_backprop == "detached"
        algorithm = replace(algorithm, kl_coef=place.kl.coef)
        objective = algorithm.critic_objective if warming_up else algorithm.objective
        beside = None if warming_up else rehearsal

        if place.experience is None:
            doing("sampling")
            rollout = generate(policy, prompts_P, sampling, step)  # 1 rollout
            doing("scoring")
            place.experience = evaluate(  # 2 evaluate
                rollout, policy, reference, score, algorithm, cfg, microbatch_tokens, normalize
            )
            recovery.reached(str(place))
        experience, seed = place.experience, derive_seed(sampling.seed, step)
        doing("updating")
        with policy.backbone.training(dropout=False):  # 3 update
            stats = update(policy, optimizer, experience, objective, plan, seed, beside, place.taken, stepped)

        figures = summarize(experience) | {"kl_coef": place.kl.coef}
        if algorithm.critic_objective is not None:
            figures |= summarize_critic(experience)
        log(step, figures | stats, experience)
        watch(step + 1)
        place.next(place.kl.after(figures["kl_per_sequence_k1"], len(experience)))
        recovery.reached(str(place))


def prompts_in_turn(questions: list[Prompt], cfg: PPOParams, seed: int) -> Iterator[list[Prompt]]:
    """The different prompts that each iteration asks.

    Raises:
        TrainingError: there are fewer than one iteration needs.
    """
    refuse_few_prompts(cfg, len(questions))
    return prompt_batches(questions, cfg.prompts_per_iteration, cfg.iterations, seed)


def optimizer_for(policy: Policy, cfg: PPOParams) -> Optimizer:
    """Adam over the policy's adapter and, where it has one, its value head; the adapter becomes trainable."""
    groups = [ParameterGroup("policy", policy.backbone.train(policy.adapter), cfg.lr)]
    if policy.value_head is not None:
        groups.append(ParameterGroup("value", list(policy.value_head.parameters()), cfg.value_lr))
    return Optimizer(groups, cfg.max_grad_norm, constant_after_warmup(cfg.warmup_steps))
