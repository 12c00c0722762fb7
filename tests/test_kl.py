"""KL in the reward, as a loss, at a fixed or adaptive price; demonstrations beside; groups of answers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from worlds import PROMPTS, SAMPLING, World, lengths_B, ppo_params

from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Experience, Rollout
from pipeline.data.examples import sequences
from pipeline.errors import ParameterError, TrainingError
from pipeline.evaluation import evaluate, summarize
from pipeline.kl_control import KLControl
from pipeline.objectives.online import kl_loss, movement, with_kl
from pipeline.objectives.terms import Terms
from pipeline.online import optimizer_for, prompts_in_turn, train_online
from pipeline.params.ppo import PPOParams
from pipeline.params.section import parse_section
from pipeline.roles import Policy
from pipeline.rollout import generate
from pipeline.update import Rehearsal, UpdatePlan, update

LOGITS = torch.tensor([0.5, -1.0, 0.3, 1.2])
REFERENCE = torch.log_softmax(torch.tensor([0.1, 0.4, -0.7, 0.2]), -1)


def expected_gradient(estimator: str) -> torch.Tensor:
    """The loss's gradient with respect to the logits, each token weighted by its own probability: no sampling, no noise."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    mask = torch.ones(1, 4).bool()
    weights = logprobs.detach().exp()[None]
    kl_loss(logprobs[None], REFERENCE[None], mask, estimator, weights).loss_sum.backward()
    return logits.grad


def test_the_gradient_of_k2_is_that_of_kl_to_the_reference() -> None:
    """d KL(p || q) / d logit_i = p_i (log p_i / q_i - KL), by hand."""
    log_p = torch.log_softmax(LOGITS, -1)
    p, log_ratio = log_p.exp(), log_p - REFERENCE
    by_hand = p * (log_ratio - (p * log_ratio).sum())
    torch.testing.assert_close(expected_gradient("k2"), by_hand, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_k3_is_that_of_kl_from_the_reference() -> None:
    """d KL(q || p) / d logit_i = p_i - q_i, by hand."""
    by_hand = torch.softmax(LOGITS, -1) - REFERENCE.exp()
    torch.testing.assert_close(expected_gradient("k3"), by_hand, rtol=1e-5, atol=1e-6)


def test_kl_loss_by_hand() -> None:
    """Log-ratios (1, -2), padding after: k2 0.5 + 2; with weights (1, 0.5): 0.5 + 1. A policy loss of 3 at 0.1 a nat: 3.15."""
    logprobs_BR, mask_BR = torch.tensor([[1.0, -2.0, 9.0]]), torch.tensor([[True, True, False]])
    assert float(kl_loss(logprobs_BR, torch.zeros(1, 3), mask_BR, "k2").loss_sum) == pytest.approx(2.5)
    kl = kl_loss(logprobs_BR, torch.zeros(1, 3), mask_BR, "k2", torch.tensor([[1.0, 0.5, 7.0]]))
    assert float(kl.loss_sum) == pytest.approx(1.5)
    total = with_kl(Terms(torch.tensor(3.0), {"loss": torch.tensor(3.0)}), kl, 0.1)
    assert float(total.loss_sum) == float(total.sums["loss"]) == pytest.approx(3.15)
    assert float(total.sums["kl_loss"]) == pytest.approx(1.5)


def test_movement_by_hand() -> None:
    """Ratios 2 and 0.5 of new to old: k3 of old against new is 2 - 1 - ln 2, and 0.5 - 1 + ln 2."""
    moved = movement(torch.log(torch.tensor([[2.0, 0.5]])), torch.zeros(1, 2), torch.ones(1, 2).bool())
    assert float(moved.sums["update_k3"]) == pytest.approx(0.5)
    assert float(moved.maxima["ratio_max"]) == pytest.approx(2.0)
    assert float(moved.maxima["log_ratio_max"]) == pytest.approx(math.log(2))


def test_the_price_moves_toward_the_target_by_hand() -> None:
    """Target 5. 6 nats: 1 + 0.2 * 100 / 1000; 50 nats: no faster; 4.5 nats: 1 - 0.1 * 100 / 1000. Without a target it stays."""
    control = KLControl(0.1, target=5.0, horizon=1000)
    assert control.after(6.0, 100).coef == pytest.approx(0.102)
    assert control.after(50.0, 100).coef == pytest.approx(0.102)
    assert control.after(4.5, 100).coef == pytest.approx(0.099)
    assert KLControl(0.1, None, 1000).after(50.0, 100).coef == 0.1


# --- parameters ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_loss_estimator": "k1"}, "ppo.kl_loss_estimator is 'k1' but must be k2 or k3: the gradient of k1 as a loss is 0 on average; use k2."),
        ({"kl_loss_estimator": "kl"}, "ppo.kl_loss_estimator is 'kl' but must be k2 or k3; use k2."),
        ({"kl_estimator": "abs"}, "ppo.kl_estimator is 'abs' but must be k1 or k3; use k1."),
        ({"algorithm": "rloo", "rollout_size": 64, "minibatch_size": 16, "group_size": 6}, "ppo.group_size is 6 but must divide ppo.rollout_size 64; try 4 or 8."),
        ({"algorithm": "grpo", "rollout_size": 10, "minibatch_size": 4, "group_size": 4}, "ppo.minibatch_size is 4 but must divide ppo.rollout_size 10; try 2 or 5. ppo.group_size is 4 but must divide ppo.rollout_size 10; try 2 or 5."),
        ({"group_size": 1}, "ppo.group_size is 1 but must be greater than or equal to 2; for example 4."),
    ],
    ids=["k1 as a loss", "unknown in the loss", "unknown in the reward", "group", "group and minibatch", "alone"],
)  # fmt: skip
def test_what_is_refused_and_why(change: dict, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        parse_section("ppo", PPOParams, ppo_params().model_dump() | change)
    assert str(error.value) == message


def test_a_group_that_nobody_reads_need_not_divide() -> None:
    assert ppo_params(group_size=3).prompts_per_iteration == 8
    assert ppo_params(algorithm="rloo", group_size=4).prompts_per_iteration == 2


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        ({}, []),
        ({"algorithm": "grpo"}, []),
        ({"algorithm": "grpo", "critic_warmup": 2}, ["ppo.critic_warmup is 2 but grpo does not read it; ppo would."]),
        ({"algorithm": "rloo", "gamma": 0.9}, ["ppo.gamma is 0.9 but rloo does not read it; ppo and reinforce would."]),
        ({"kl_loss_estimator": "k3"}, ["ppo.kl_loss_estimator is k3 but ppo does not read it; grpo would."]),
        ({"algorithm": "reinforce", "epochs": 2}, ["ppo.epochs is 2 but reinforce has no ratio that corrects for answers of an older policy; 1 is usual."]),
        ({"kl_target": 6.0, "kl_horizon": 10_000}, ["ppo.kl_horizon is 10000 but the run has 16 answers in all, in which kl_coef hardly moves toward ppo.kl_target; try 5."]),
    ],
    ids=["ppo", "grpo", "no critic", "no discount", "no kl loss", "no ratio", "far horizon"],
)  # fmt: skip
def test_values_without_effect_are_told(change: dict, notes: list[str]) -> None:
    assert ppo_params(**({"kl_horizon": 16} | change)).notes == notes


def test_what_a_discount_leaves_of_the_score_by_hand() -> None:
    """0.99^200 = 13.4%."""
    assert ppo_params().discount_notes(200.0) == []
    assert ppo_params(gamma=0.99).discount_notes(200.0) == [
        "ppo.gamma is 0.99: of the score 13% is left at the first token of an answer of median length, 200 tokens; "
        "that teaches brevity, 1.0 does not."
    ]


def test_an_iteration_needs_its_prompts_and_groups_need_fewer() -> None:
    cfg = ppo_params(rollout_size=16, minibatch_size=8, algorithm="grpo", group_size=2)
    assert len(next(prompts_in_turn(PROMPTS, cfg, seed=1))) == 8
    with pytest.raises(
        TrainingError, match=r"ppo.rollout_size is 16 in groups of 2 but the part ppo has 7 prompts.* at most 14"
    ):
        prompts_in_turn(PROMPTS[:7], cfg, seed=1)


# --- groups ---


def test_answers_to_one_prompt_are_neighbours_with_noise_of_their_own(make_backbone: Callable[..., Backbone]) -> None:
    policy = Policy(make_backbone(), "sft", 1.0, 16)
    grouped = generate(policy, PROMPTS, replace(SAMPLING, samples=3), step=2)
    assert grouped.prompt_ids_B.tolist() == [prompt.key for prompt in PROMPTS for _ in range(3)]
    single = generate(policy, PROMPTS, SAMPLING, step=2)
    first = grouped.select(torch.arange(0, 24, 3))
    assert torch.equal(first.response_ids_BR, single.response_ids_BR)  # sample 0 is what one sample would be
    answers = {
        tuple(ids[:length])
        for ids, length in zip(grouped.response_ids_BR.tolist(), grouped.response_lengths_B, strict=True)
    }
    assert len(answers) > 16


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_change_no_sample_of_a_group(make_backbone: Callable[..., Backbone], chunk: int) -> None:
    """Chunks may cut a group."""
    policy = Policy(make_backbone(), "sft", 1.0, 16)
    sampling = replace(SAMPLING, samples=4)
    together = generate(policy, PROMPTS, sampling, step=1)
    apart = generate(policy, PROMPTS, replace(sampling, chunk=chunk), step=1)
    assert torch.equal(together.tokens_BT, apart.tokens_BT)


# --- whole updates ---


def ids_B(rows: Rollout) -> torch.Tensor:
    """A score in which no two answers are likely to agree."""
    return (rows.response_ids_BR * rows.response_mask_BR).sum(1) / 1000


def train(world: World, cfg: PPOParams, **more) -> list[dict[str, float]]:
    """What each iteration logs."""
    policy = world.policy if cfg.algorithm == "ppo" else replace(world.policy, value_head=None)
    logged: list[dict[str, float]] = []
    train_online(
        policy,
        world.reference,
        ids_B,
        prompts_in_turn(PROMPTS, cfg, 5),
        optimizer_for(policy, cfg),
        algorithm_of(cfg),
        cfg,
        SAMPLING,
        3,
        lambda _, stats, __: logged.append(stats),
        lambda _: None,
        **more,
    )
    return logged


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo"])
def test_without_a_critic_there_are_no_figures_of_one_and_the_policy_moves(
    make_backbone: Callable[..., Backbone], name: str
) -> None:
    cfg = ppo_params(algorithm=name, critic_warmup=2)  # in vain
    world = World(make_backbone, cfg)
    before = world.backbone.adapter_hash("policy")
    logged = train(world, cfg)
    assert world.backbone.adapter_hash("policy") != before
    for stats in logged:
        assert not [key for key in stats if "value" in key or key == "explained_variance"]
        assert {"policy_loss", "update_k3", "kl_per_sequence_k1", "kl_per_token_k1", "kl_per_token_k3"} <= set(stats)
    assert logged[0]["first_log_ratio_max"] == 0
    assert ("kl_loss" in logged[0]) == (name == "grpo")


def moved(world: World) -> None:
    """The policy leaves the reference."""
    with torch.no_grad():
        for parameter in world.backbone.adapter_parameters("policy"):
            parameter.add_(torch.randn_like(parameter) * 0.02)


def grouped_experience(world: World, cfg: PPOParams) -> Experience:
    rollout = generate(world.policy, PROMPTS[:4], replace(SAMPLING, samples=2), step=0)
    return evaluate(rollout, world.policy, world.reference, lengths_B, algorithm_of(cfg), cfg, 4)


def test_grpo_is_paid_the_score_alone_and_rloo_less_kl(make_backbone: Callable[..., Backbone]) -> None:
    """By a loop: advantages of a pair are half the difference (centred) or the whole (leave-one-out) of what the two are paid."""
    shared = {"group_size": 2, "kl_coef": 0.3, "missing_eos_penalty": 0.0}
    world = World(make_backbone, ppo_params())
    moved(world)
    for name, share, price in (("grpo", 0.5, 0.0), ("rloo", 1.0, 0.3)):
        experience = grouped_experience(world, ppo_params(algorithm=name, scale_by_std=False, **shared))
        kl_B = (experience.old_logprobs_BR - experience.ref_logprobs_BR).sum(1).tolist()
        paid = [score - price * kl for score, kl in zip(experience.scores_B.tolist(), kl_B, strict=True)]
        assert max(map(abs, kl_B)) > 0.01
        for row in range(8):
            expected = share * (paid[row] - paid[row ^ 1])
            length = int(experience.response_lengths_B[row])
            assert experience.advantages_BR[row, :length].tolist() == pytest.approx([expected] * length, abs=1e-5)


def test_groups_without_spread_are_counted(make_backbone: Callable[..., Backbone]) -> None:
    """Answers to prompts 0 and 1 are scored by what they say, those to 2 and 3 all alike: two of four groups tell nothing."""
    cfg = ppo_params(algorithm="grpo", group_size=2, missing_eos_penalty=0.0)
    world = World(make_backbone, cfg)
    rollout = generate(world.policy, PROMPTS[:4], replace(SAMPLING, samples=2), step=0)

    def score(rows: Rollout) -> torch.Tensor:
        return torch.where(rows.prompt_ids_B < 2, ids_B(rows), 0.1)

    experience = evaluate(rollout, world.policy, world.reference, score, algorithm_of(cfg), cfg, 4)
    assert summarize(experience)["answers_without_advantage"] == 0.5
    assert summarize(World(make_backbone, ppo_params()).experience(4))["answers_without_advantage"] == 0.0


def test_the_price_is_paid_by_the_next_iteration(make_backbone: Callable[..., Backbone]) -> None:
    """KL 0 at first is below any target: with 8 answers and horizon 16 the price falls by 0.2 * 8 / 16 to 0.9 of itself."""
    cfg = ppo_params(kl_target=5.0, kl_horizon=16, kl_coef=0.1)
    first, second = train(World(make_backbone, cfg), cfg)
    assert first["kl_per_sequence_k1"] == 0
    assert (first["kl_coef"], second["kl_coef"]) == (0.1, pytest.approx(0.09))


@pytest.mark.parametrize("name", ["ppo", "reinforce", "rloo", "grpo"])
def test_stop_kl_stops_every_algorithm(make_backbone: Callable[..., Backbone], name: str) -> None:
    cfg = ppo_params(algorithm=name, epochs=2, stop_kl=1e-9, iterations=1, lr=1e-2, warmup_steps=0)
    (stats,) = train(World(make_backbone, cfg), cfg)
    assert (stats["update_steps"], stats["update_steps_skipped"]) == (1, 3)


# --- demonstrations beside ---

SHOWN = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, 2][n % 3 :]) for n in range(9)])


def rehearsal_of(world: World, coef: float) -> Rehearsal:
    return Rehearsal(Policy(world.backbone, "policy", 1.0, 16), SHOWN, coef)


def test_the_sft_loss_is_added_at_its_weight_by_a_loop(make_backbone: Callable[..., Backbone]) -> None:
    """One step; both losses are divided by their own number of tokens. Gradients are linear: RL's plus 0.7 of SFT's."""
    world = World(make_backbone, ppo_params(epochs=1, minibatch_size=8, temperature=0.5))
    experience = world.experience(8)
    parameters = world.optimizer.groups[0].parameters
    plan = UpdatePlan(epochs=1, minibatch_size=9, microbatch_tokens=1000, stop_kl=None)
    taken: dict[float, torch.Tensor] = {}
    losses: dict[float, dict[str, float]] = {}

    class Keeping:
        """Keeps the gradients instead of stepping."""

        def zero_grad(self) -> None:
            """Nothing has been broken off here."""

        def step(self, loss: float) -> dict[str, float]:
            taken[coef] = torch.cat([parameter.grad.flatten() for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
            return {}

    for coef in (0.0, 0.7):
        with world.backbone.training(dropout=False):
            rehearsal = rehearsal_of(world, coef) if coef else None
            objective = algorithm_of(world.cfg).objective
            losses[coef] = update(world.policy, Keeping(), experience, objective, plan, seed=1, rehearsal=rehearsal)
    total, count = 0.0, 0
    for row in range(len(SHOWN)):
        length, start = int(SHOWN.lengths_B[row]), int(SHOWN.prompt_lengths_B[row])
        world.backbone.activate("policy")
        logits = world.backbone.causal(input_ids=SHOWN.tokens_BT[row : row + 1, :length]).logits[0]
        for place in range(start, length):
            total = total - torch.log_softmax(logits[place - 1], -1)[SHOWN.tokens_BT[row, place]]
            count += 1
    (total / count).backward()
    sft_gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert losses[0.7]["ptx_loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert losses[0.7]["loss"] == pytest.approx(losses[0.0]["loss"] + 0.7 * float(total.detach()) / count, rel=1e-5)
    difference = taken[0.7] - taken[0.0] - 0.7 * sft_gradient
    assert float(difference.norm() / sft_gradient.norm()) < 1e-5


def test_demonstrations_are_not_forgotten_and_come_in_an_order_of_the_seed(
    make_backbone: Callable[..., Backbone],
) -> None:
    """With a large weight the demonstrations are learnt while PPO runs; a second run is equal to the last bit."""
    cfg = ppo_params(iterations=4, ptx_coef=5.0, lr=1e-2, warmup_steps=0, stop_kl=None)
    hashes, losses = [], []
    for _ in range(2):
        world = World(make_backbone, cfg)
        losses = [stats["ptx_loss"] for stats in train(world, cfg, rehearsal=rehearsal_of(world, cfg.ptx_coef))]
        hashes.append(world.backbone.adapter_hash("policy"))
    assert losses[-1] < losses[0] - 0.5
    assert hashes[0] == hashes[1]


def test_nothing_is_rehearsed_while_the_critic_warms_up(make_backbone: Callable[..., Backbone]) -> None:
    cfg = ppo_params(critic_warmup=2, ptx_coef=5.0)
    world = World(make_backbone, cfg)
    before = world.backbone.adapter_hash("policy")
    logged = train(world, cfg, rehearsal=rehearsal_of(world, cfg.ptx_coef))
    assert world.backbone.adapter_hash("policy") == before
    assert not any("ptx_loss" in stats for stats in logged)
