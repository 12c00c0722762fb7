"""The loops: what is learnt, what is clipped and skipped, and offline sums that no micro-batch changes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from worlds import FAMILIES, SAMPLING, TO_THE_LIMIT, World, flat, lengths_B, ppo_params

from pipeline.algorithms import ppo
from pipeline.backbone import Backbone
from pipeline.batch import Pairs, Rollout
from pipeline.data.examples import Prompt, sequences
from pipeline.errors import TrainingError
from pipeline.evaluation import summarize
from pipeline.heads import ScalarHead
from pipeline.objectives.offline import bradley_terry
from pipeline.objectives.offline import sft as sft_objective
from pipeline.offline import train_offline
from pipeline.roles import Policy, RewardModel
from pipeline.update import Optimizer, ParameterGroup, accumulate, constant_after_warmup


def test_ppo_raises_a_reward_it_can_reach(make_backbone: Callable[..., Backbone]) -> None:
    """The score is the answer's length: with kl_coef 0 answers grow, and with the sign flipped they shrink.

    Report huggingface/trl#522, of the second: the figures say what becomes of the answers.
    """
    asked = [Prompt(key, (), [5 + (key * 7) % 200, 40, 41 + key]) for key in range(32)]
    # an untrained policy stops after about 6 of 10 tokens
    sampling = replace(SAMPLING, stop_ids=tuple(range(2, 320, 8)))
    changes = {"epochs": 1, "minibatch_size": 16, "rollout_size": 32}
    cfg = ppo_params(kl_coef=0.0, missing_eos_penalty=0.0, stop_kl=None, **changes)
    figures: dict[int, list[dict[str, float]]] = {1: [], -1: []}
    for sign in (1, -1):
        world = World(
            make_backbone,
            cfg,
            score=lambda rollout, sign=sign: sign * (lengths_B(rollout) - 6) / 3,
            sampling=sampling,
            prompts=asked,
            microbatch_rows=32,
        )
        world.train(15, lambda _, stats, __, sign=sign: figures[sign].append(stats))
    first = figures[1][0]["length_mean"]
    assert first == figures[-1][0]["length_mean"]
    last = {sign: sum(stats["length_mean"] for stats in history[-4:]) / 4 for sign, history in figures.items()}
    assert last[1] > first + 1
    assert last[-1] < first - 1
    before, after = figures[-1][0], figures[-1][-1]
    assert 1 <= after["length_p10"] <= after["length_mean"] <= after["length_p90"] <= before["length_p90"]
    assert after["end_token_rate"] > before["end_token_rate"]


def test_critic_warmup_moves_the_value_head_alone(make_backbone: Callable[..., Backbone]) -> None:
    """Report microsoft/DeepSpeedExamples#556."""
    world = World(make_backbone, ppo_params(critic_warmup=2), sampling=TO_THE_LIMIT)  # every score is 10
    before = world.backbone.adapter_hash("policy")
    losses: list[float] = []
    world.train(2, lambda _, stats, __: losses.append(stats["value_loss"]))
    assert world.backbone.adapter_hash("policy") == before
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("backprop", "moves"), [("full", True), ("detached", False)])
def test_value_backprop_says_whether_the_value_loss_reaches_the_adapter(
    make_backbone: Callable[..., Backbone], backprop: str, moves: bool
) -> None:
    world = World(make_backbone, ppo_params(value_backprop=backprop))
    torch.nn.init.normal_(world.value_head.linear.weight, std=0.1)
    world.policy.detach_values = backprop == "detached"
    experience = world.experience(8)
    with world.backbone.training(dropout=False):
        accumulate(world.policy, experience, ppo(world.cfg).critic_objective, 1000)
    assert any(parameter.grad is not None for parameter in world.optimizer.groups[0].parameters) == moves


def test_stop_kl_leaves_the_rest_of_the_update_out(make_backbone: Callable[..., Backbone]) -> None:
    world = World(make_backbone, ppo_params(epochs=4, stop_kl=1e-9))
    stats = world.update(world.experience(8), 8)
    # the first minibatch has KL 0 and is taken; after it the policy has moved
    assert (stats["update_steps"], stats["update_steps_skipped"]) == (1, 7)


def test_old_logprobs_may_be_the_samplers(make_backbone: Callable[..., Backbone]) -> None:
    world = World(make_backbone, ppo_params(old_logprobs="rollout"))
    experience = world.experience(8)
    assert torch.equal(experience.old_logprobs_BR, experience.behaviour_logprobs_BR)
    assert torch.equal(experience.weights_BR, torch.ones_like(experience.weights_BR))


def test_rewards_sum_to_score_less_kl(make_backbone: Callable[..., Backbone]) -> None:
    """Report huggingface/trl#3750: the score stands on the last token of the answer, and nowhere else."""
    world = World(make_backbone, ppo_params(kl_coef=0.1, missing_eos_penalty=1.0))
    with torch.no_grad():
        for parameter in world.backbone.adapter_parameters("policy"):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    experience = world.experience(4)
    kl_BR = experience.old_logprobs_BR - experience.ref_logprobs_BR
    expected_B = experience.scores_B - experience.truncated_B.float() - 0.1 * kl_BR.sum(1)
    assert float(kl_BR.abs().max()) > 0.01
    torch.testing.assert_close(experience.rewards_BR.sum(1), expected_B, rtol=0, atol=1e-5)
    last_B = experience.rewards_BR.gather(1, experience.response_lengths_B[:, None] - 1).squeeze(1)
    assert float(last_B.min()) > 0


def test_the_raw_figures_that_health_rules_read(make_backbone: Callable[..., Backbone]) -> None:
    """Report hiyouga/LLaMA-Factory#803: the share of bare end tokens is logged; pairs of tokens and signs of advantages, by hand."""
    world = World(make_backbone, ppo_params(missing_eos_penalty=0.0), score=lambda rows: lengths_B(rows) - 2)
    answers = [[2], [32], [7, 7, 7, 2], [7, 7, 9], [9]]  # the last two are cut
    tokens = sequences([([5, 6], answer) for answer in answers])
    rollout = Rollout(
        tokens_BT=tokens.tokens_BT,
        prompt_lengths_B=tokens.prompt_lengths_B,
        response_lengths_B=tokens.response_lengths_B,
        behaviour_logprobs_BR=torch.zeros(5, 4),
        truncated_B=torch.tensor([False, False, False, True, True]),
        prompt_ids_B=torch.arange(5),
    )
    figures = summarize(world.evaluate(rollout, 8))
    assert figures["end_token_only_rate"] == pytest.approx(2 / 5)
    assert figures["distinct_2"] == pytest.approx(3 / 5)  # 77 77 72 | 77 79: three of five differ
    # KL and values are 0, so an advantage has the sign of its answer's score: plus for the 4 + 3 tokens of the long ones
    assert figures["advantage_positive_share"] == pytest.approx(7 / 10)


@pytest.mark.parametrize("what", ["score", "policy"])
def test_a_score_or_logprob_that_is_not_finite_stops_before_the_update(
    make_backbone: Callable[..., Backbone], what: str
) -> None:
    def score(rows: Rollout) -> torch.Tensor:
        return lengths_B(rows) * (float("nan") if what == "score" else 1.0)

    world = World(make_backbone, score=score)
    rollout = world.rollout()
    if what == "policy":
        rollout = replace(rollout, behaviour_logprobs_BR=rollout.behaviour_logprobs_BR * float("inf"))

    with pytest.raises(TrainingError, match="is not finite: nothing is learnt from it"):
        world.evaluate(rollout, 4)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights() -> None:
    """Reports MakazhanAlpamys/Soup#532 and huggingface/trl#6668: skipped, counted, and after three the stage fails."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer([ParameterGroup("adapter", [weight], 0.1)], 1.0, lambda _: 1.0)

    def step(gradient: float, loss: float = 1.0) -> dict[str, float]:
        weight.grad = torch.full((2,), gradient)
        return optimizer.step(loss)

    assert step(float("nan"))["non_finite_steps"] == 1
    assert step(1.0, loss=float("inf"))["non_finite_steps"] == 1
    assert weight.tolist() == [1, 1]
    assert step(1.0)["non_finite_steps"] == 0
    assert weight.tolist() != [1, 1]
    step(float("nan"))
    step(float("nan"))
    with pytest.raises(TrainingError, match="not finite 3 steps in a row"):
        step(float("nan"))


def test_groups_are_clipped_apart_and_by_global_norm() -> None:
    """Gradient (3, 4) has norm 5 and is scaled to 1; Adam's first step is then lr * g / (|g| + eps) per element."""
    big, small = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer(
        [ParameterGroup("big", [big], 0.1), ParameterGroup("small", [small], 0.2)], 1.0, lambda _: 0.5
    )
    big.grad, small.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
    stats = optimizer.step(1.0)
    assert (stats["grad_norm_big"], stats["grad_norm_small"]) == (5.0, 0.5)
    assert (stats["lr_big"], stats["lr_small"]) == (0.05, 0.1)
    expected = [-0.05 * g / (g + 1e-5) for g in (0.6, 0.8)]
    torch.testing.assert_close(big.detach(), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(small.detach(), torch.tensor([-0.1 * 0.5 / (0.5 + 1e-5)]), rtol=1e-5, atol=0)


# --- offline ---

ROWS = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, 2][n % 3 :]) for n in range(9)])
OTHERS = sequences([([5 + n] * (2 + n % 4), [90 + n, 2]) for n in range(9)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_microbatch_tokens_changes_no_offline_gradient(
    make_backbone: Callable[..., Backbone], kind: str, family: str
) -> None:
    """In a pair the gradients of the two answers nearly cancel: its rounding is measured against both, not against what is left."""
    backbone = make_backbone(family)
    parameters = backbone.train("sft")

    def gradient(objective: Callable, size: int) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        with backbone.training(dropout=False):
            assert accumulate(model, batch, objective, size)["loss"] > 0
        return flat([parameter.grad for parameter in parameters])

    if kind == "sft":
        model, batch = Policy(backbone, "sft", 1.0, 16), ROWS
        objective = lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR)  # noqa: E731
        summed = float(gradient(objective, 1000).norm())
    else:
        model, batch = RewardModel(backbone, "sft", ScalarHead(backbone.hidden_size, std=0.1)), Pairs(ROWS, OTHERS)
        objective = lambda scores, _: bradley_terry(*scores)  # noqa: E731
        of_chosen = gradient(lambda scores, _: bradley_terry(scores[0], scores[1].detach()), 1000)
        of_rejected = gradient(lambda scores, _: bradley_terry(scores[0].detach(), scores[1]), 1000)
        summed = float(of_chosen.norm() + of_rejected.norm())
    whole = gradient(objective, 1000)
    for size in (1, 20, 40):
        assert float((gradient(objective, size) - whole).norm()) < 1e-6 * summed


def test_sft_learns_rows_by_heart_and_every_b_moves(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone(perturb=False, quantization="nf4")
    model = Policy(backbone, "sft", 1.0, 16)
    optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 2e-2)], 1.0, constant_after_warmup(0))
    losses: list[float] = []
    train_offline(
        model,
        [ROWS] * 40,
        optimizer,
        lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR),
        40,
        dropout=True,
        log=lambda _, stats: losses.append(stats["loss"]),
    )
    assert losses[-1] < losses[0] / 2
    b_norms = [float(tensor.norm()) for key, tensor in backbone.adapter_state("sft").items() if "lora_B" in key]
    assert len(b_norms) == 14 and min(b_norms) > 0


def test_sft_loss_is_the_mean_over_response_tokens_by_a_loop(make_backbone: Callable[..., Backbone]) -> None:
    """Against transformers' logits and a loop over rows and tokens."""
    backbone = make_backbone()
    model = Policy(backbone, "sft", 1.0, 16)
    backbone.train("sft")
    with backbone.training(dropout=False):
        stats = accumulate(
            model, ROWS, lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR), 40
        )
    total, count = 0.0, 0
    for row in range(len(ROWS)):
        length, start = int(ROWS.lengths_B[row]), int(ROWS.prompt_lengths_B[row])
        with torch.no_grad():
            logits = backbone.causal(input_ids=ROWS.tokens_BT[row : row + 1, :length]).logits[0]
        for place in range(start, length):
            total -= float(torch.log_softmax(logits[place - 1], -1)[ROWS.tokens_BT[row, place]])
            count += 1
    assert count == ROWS.num_terms
    assert abs(stats["loss"] - total / count) < 1e-5
