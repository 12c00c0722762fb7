"""Worked values from ../shared/golden/math.json, computed with loops over plain floats, and a few of its cases by value."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from conftest import SHARED

from pipeline.advantages import gae, group_centered, group_normalized, leave_one_out, reward_to_go
from pipeline.evaluation import shaped_scores, token_rewards
from pipeline.kl_control import KLControl
from pipeline.objectives.kl import k1, k2, k3
from pipeline.objectives.offline import bradley_terry, dpo
from pipeline.objectives.online import clipped_surrogate, clipped_value, policy_gradient
from pipeline.tensors import (
    length_mask,
    masked_center,
    masked_sum,
    masked_whiten,
    safe_exp,
    token_logprobs,
    token_logprobs_and_entropies,
)

FILE = SHARED / "golden" / "math.json"
SECTIONS = {"ppo": [], "groups": [], "reward_pairs": [], "dpo": [], "adaptive_kl": {}}
GOLDEN = json.loads(FILE.read_text()) if FILE.is_file() else SECTIONS
needs_file = pytest.mark.skipif(not FILE.is_file(), reason="../shared/golden is not beside this checkout")


def close(actual: torch.Tensor | float, expected: list | float) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def sizes(rows: list[list]) -> tuple[int, int]:
    return len(rows), len(rows[0])


class Case:
    """One PPO case as float32 tensors."""

    def __init__(self, content: dict):
        self.raw, self.want = content["inputs"], content["expected"]
        self.lengths_B = torch.tensor(self.raw["lengths"])
        self.width = len(self.raw["response_ids"][0])
        self.mask_BR = length_mask(self.lengths_B, self.width)
        self.ids_BR = torch.tensor(self.raw["response_ids"])

    def logprobs(self, name: str) -> torch.Tensor:
        """Our function on given logits: the head is the identity, so that hidden states are logits."""
        logits_BRV = torch.tensor(self.raw[name])
        head_VV = torch.eye(logits_BRV.shape[-1])
        flat = token_logprobs(logits_BRV[self.mask_BR], head_VV, self.ids_BR[self.mask_BR], self.raw["temperature"], 3)
        return torch.zeros(self.mask_BR.shape).masked_scatter(self.mask_BR, flat)

    def entropy_sum(self) -> float:
        logits_BRV = torch.tensor(self.raw["logits"])
        head_VV = torch.eye(logits_BRV.shape[-1])
        _, entropies_N = token_logprobs_and_entropies(
            logits_BRV[self.mask_BR], head_VV, self.ids_BR[self.mask_BR], self.raw["temperature"], 3
        )
        return float(entropies_N.sum())

    def rewards(self, estimator: str) -> torch.Tensor:
        scores_B = shaped_scores(
            torch.tensor(self.raw["scores"]), torch.tensor(self.raw["truncated"]), 1e6, self.raw["missing_eos_penalty"]
        )
        log_ratio_BR = self.logprobs("logits") - self.logprobs("ref_logits")
        return token_rewards(scores_B, log_ratio_BR, self.mask_BR, self.raw["kl_coef"], estimator)


@needs_file
@pytest.mark.parametrize("content", GOLDEN["ppo"], ids=lambda content: content["name"])
def test_ppo_case(content: dict) -> None:
    case = Case(content)
    want, raw, mask_BR = case.want, case.raw, case.mask_BR
    assert int(mask_BR.sum()) == want["terms"]
    old_BR, ref_BR, new_BR = (case.logprobs(name) for name in ("logits", "ref_logits", "new_logits"))
    close(old_BR, want["logprobs"])
    close(ref_BR, want["ref_logprobs"])
    log_ratio_BR = old_BR - ref_BR
    for estimator, name in ((k1, "k1"), (k2, "k2"), (k3, "k3")):
        close(torch.where(mask_BR, estimator(log_ratio_BR), 0), want[name])
    close(torch.where(mask_BR, k1(log_ratio_BR), 0).sum(1), want["kl_per_sequence_k1"])
    close(case.entropy_sum(), want["entropy_sum"])

    rewards_BR = case.rewards("k1")
    close(rewards_BR, want["rewards"])
    close(case.rewards("k3"), want["rewards_k3"])
    values_BR = torch.tensor(raw["values"])
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, raw["gamma"], raw["lam"])
    close(advantages_BR, want["advantages"])
    close(returns_BR, want["returns"])
    bootstrap_B = torch.tensor(raw["bootstrap_values"]) * torch.tensor(raw["truncated"])
    close(
        gae(rewards_BR, values_BR, mask_BR, raw["gamma"], raw["lam"], bootstrap_B)[0], want["advantages_bootstrapped"]
    )
    to_go_BR = reward_to_go(rewards_BR, mask_BR, raw["gamma"])
    close(to_go_BR, want["reward_to_go"])
    close(masked_center(to_go_BR, mask_BR), want["reward_to_go_minus_batch_mean"])
    whitened_BR = masked_whiten(advantages_BR, mask_BR)
    close(whitened_BR, want["whitened_advantages"])

    policy = clipped_surrogate(new_BR, old_BR, whitened_BR, mask_BR, raw["clip"])
    close(policy.loss_sum, want["policy_loss_sum"])
    close(policy.sums["clip_fraction"], want["clip_count"])
    close(policy.sums["update_k3"], want["old_to_new_k3_sum"])
    close(policy.maxima["ratio_max"], want["ratio_max"])
    dual = clipped_surrogate(new_BR, old_BR, whitened_BR, mask_BR, raw["clip"], dual_clip=3.0)
    close(dual.loss_sum, want["policy_loss_sum_dual_clip_3"])
    weights_BR = safe_exp(old_BR - torch.tensor(raw["behaviour_logprobs"])).clamp(max=2.0)
    weighted = clipped_surrogate(new_BR, old_BR, whitened_BR, mask_BR, raw["clip"], weights_BR)
    close(weighted.loss_sum, want["policy_loss_sum_behaviour_weighted_cap_2"])
    value = clipped_value(torch.tensor(raw["new_values"]), values_BR, returns_BR, mask_BR, raw["clip_value"])
    close(value.loss_sum, want["value_loss_sum"])
    close(value.sums["value_clip_fraction"], want["value_clip_count"])


@needs_file
@pytest.mark.parametrize("group", GOLDEN["groups"], ids=lambda group: "x".join(map(str, sizes(group["rewards"]))))
def test_group(group: dict) -> None:
    rewards_PG = torch.tensor(group["rewards"])
    close(leave_one_out(rewards_PG), group["rloo"])
    close(group_normalized(rewards_PG), group["grpo"])
    close(group_centered(rewards_PG), group["grpo_without_std"])


@needs_file
@pytest.mark.parametrize(
    "pair", GOLDEN["reward_pairs"], ids=lambda pair: f"{pair['chosen']:.1f}_{pair['rejected']:.1f}"
)
def test_reward_pair(pair: dict) -> None:
    chosen_B = torch.tensor([pair["chosen"]], requires_grad=True)
    terms = bradley_terry(chosen_B, torch.tensor([pair["rejected"]]), pair["margin"])
    terms.loss_sum.backward()
    close(terms.loss_sum.detach(), pair["loss"])
    close(chosen_B.grad[0], pair["grad_chosen"])


def test_reward_pair_with_smoothing_by_hand() -> None:
    """Gap 1, margin 0.5, e = 0.1: x = 0.5; 0.9 * 0.474077 + 0.1 * 0.974077. The gradient is sigmoid(x) - 0.9."""
    chosen_B, rejected_B = torch.tensor([1.5], requires_grad=True), torch.tensor([0.5])
    terms = bradley_terry(chosen_B, rejected_B, margin=0.5, label_smoothing=0.1)
    terms.loss_sum.backward()
    close(terms.loss_sum.detach(), 0.524077)
    close(chosen_B.grad, [0.622459 - 0.9])
    assert float(terms.sums["accuracy"]) == 1


def test_smoothing_stops_pulling_where_the_odds_are_met() -> None:
    """At e = 0.2 the loss is least at a gap of ln(0.8 / 0.2) = ln 4, and its gradient 0."""
    chosen_B = torch.tensor([4.0]).log().requires_grad_()
    bradley_terry(chosen_B, torch.zeros(1), label_smoothing=0.2).loss_sum.backward()
    close(chosen_B.grad, [0.0])


@needs_file
@pytest.mark.parametrize("pair", GOLDEN["reward_pairs"], ids=lambda pair: f"{pair['chosen']:g}-{pair['rejected']:g}")
def test_without_smoothing_no_bit_differs(pair: dict) -> None:
    """The default is -log sigmoid and nothing else, in loss and gradient, to the bit."""
    grads = []
    for smoothed in (False, True):
        chosen_B = torch.tensor([pair["chosen"]], requires_grad=True)
        gap_B = chosen_B - torch.tensor([pair["rejected"]]) - pair["margin"]
        loss = torch.nn.functional.softplus(-gap_B).sum()
        if smoothed:
            loss = bradley_terry(chosen_B, torch.tensor([pair["rejected"]]), pair["margin"], 0.0).loss_sum
        loss.backward()
        grads.append((float(loss.detach()), float(chosen_B.grad)))
    assert grads[0] == grads[1]


@needs_file
@pytest.mark.parametrize("pair", GOLDEN["dpo"], ids=lambda pair: f"{pair['beta']}_{pair['loss']:.2f}")
def test_dpo_pair(pair: dict) -> None:
    """The gradient of the chosen answer's log-probability: beta * ((1 - e) * (sigmoid(margin) - 1) + e * sigmoid(margin))."""
    names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
    logprobs = [torch.tensor([pair[name]], requires_grad=name == "policy_chosen") for name in names]
    terms = dpo(*logprobs, pair["beta"], pair["label_smoothing"])
    close(terms.loss_sum.detach(), pair["loss"])
    close(terms.sums["reward_chosen"], pair["chosen_reward"])
    close(terms.sums["reward_rejected"], pair["rejected_reward"])
    margin = pair["chosen_reward"] - pair["rejected_reward"]
    close(terms.sums["margin"], margin)
    close(terms.sums["accuracy"], float(margin > 0))
    terms.loss_sum.backward()
    right = 1 / (1 + math.exp(-margin))
    smoothing = pair["label_smoothing"]
    close(logprobs[0].grad, [pair["beta"] * ((1 - smoothing) * (right - 1) + smoothing * right)])


@needs_file
def test_adaptive_kl() -> None:
    """Report ray-project/ray#22444, named by NVIDIA-NeMo/RL#3171: the coefficient is all the state, so that a resumed run goes on from it."""
    case = GOLDEN["adaptive_kl"]
    control = KLControl(case["start"], case["target_kl"], case["horizon"])
    for step in case["steps"]:
        control = control.after(step["kl"], step["n"])
        assert control.coef == pytest.approx(step["kl_coef_after"], rel=1e-8)
        assert KLControl(**json.loads(json.dumps(asdict(control)))) == control


def test_gae_of_one_reward_at_the_end_by_hand() -> None:
    """Reward 1 on the last of three tokens, V = 0, gamma 1, lambda 0.95: 0.95^2, 0.95, 1."""
    advantages_BR, returns_BR = gae(torch.tensor([[0.0, 0, 1]]), torch.zeros(1, 3), torch.ones(1, 3).bool(), 1.0, 0.95)
    close(advantages_BR, [[0.9025, 0.95, 1.0]])
    close(returns_BR, [[0.9025, 0.95, 1.0]])


def test_gae_with_values_by_hand() -> None:
    """r = (0, 2), V = (0.5, 1), gamma 0.5, lambda 0.5: delta_1 = 2 - 1 = 1; delta_0 = 0.5 * 1 - 0.5 = 0; A_0 = 0.25 * 1."""
    advantages_BR, returns_BR = gae(
        torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 1.0]]), torch.ones(1, 2).bool(), 0.5, 0.5
    )
    close(advantages_BR, [[0.25, 1.0]])
    close(returns_BR, [[0.75, 2.0]])


def test_padding_cannot_leak_into_advantages_even_as_nan() -> None:
    nan = float("nan")
    rewards_BR, values_BR = torch.tensor([[1.0, nan], [0.0, 1.0]]), torch.tensor([[0.25, nan], [0.0, 0.0]])
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor([[True, False], [True, True]]), 1.0, 1.0)
    close(advantages_BR, [[0.75, 0.0], [1.0, 1.0]])
    close(returns_BR, [[1.0, 0.0], [1.0, 1.0]])


def test_reward_to_go_by_hand() -> None:
    """r = (1, 0, 4), gamma 0.5: 1 + 0.5 * 2, 0.5 * 4, 4; with 8 still to come after the last token: 3, 4, 8."""
    rewards_BR, mask_BR = torch.tensor([[1.0, 0, 4]]), torch.ones(1, 3).bool()
    close(reward_to_go(rewards_BR, mask_BR, 0.5), [[2.0, 2.0, 4.0]])
    close(reward_to_go(rewards_BR, mask_BR, 0.5, bootstrap_B=torch.tensor([8.0])), [[3.0, 4.0, 8.0]])


def test_groups_by_hand() -> None:
    """Rewards (1, 2, 6): mean 3, std sqrt((4 + 1 + 9) / 3) = 2.160247; the means of the others are 4, 3.5 and 1.5."""
    rewards_PG = torch.tensor([[1.0, 2.0, 6.0]])
    close(leave_one_out(rewards_PG), [[-3.0, -1.5, 4.5]])
    close(group_centered(rewards_PG), [[-2.0, -1.0, 3.0]])
    close(group_normalized(rewards_PG), [[-0.9258197, -0.4629098, 1.3887295]])


@pytest.mark.parametrize("rewards", [[[5.0]], [[0.1, 0.1, 0.1]]], ids=["one answer", "equal answers"])
def test_a_group_without_spread_is_finite_and_zero(rewards: list) -> None:
    """Report huggingface/trl#4662."""
    rewards_PG = torch.tensor(rewards)
    for estimate in (leave_one_out, group_centered, group_normalized):
        close(estimate(rewards_PG), torch.zeros_like(rewards_PG).tolist())


def test_policy_gradient_by_hand() -> None:
    """A = (2, -1), log p = (-0.5, -3), weights (1, 0.5): 1 - 1.5 = -0.5; d/d logp = -A w = (-2, 0.5)."""
    logprobs_BR = torch.tensor([[-0.5, -3.0, 7.0]], requires_grad=True)
    mask_BR = torch.tensor([[True, True, False]])
    terms = policy_gradient(logprobs_BR, torch.tensor([[2.0, -1.0, 9.0]]), mask_BR, torch.tensor([[1.0, 0.5, 1.0]]))
    terms.loss_sum.backward()
    close(terms.loss_sum.detach(), -0.5)
    close(logprobs_BR.grad, [[-2.0, 0.5, 0.0]])


def test_clipped_surrogate_by_hand() -> None:
    """r = (2, 0.5), A = (1, -1), clip 0.2: terms -1.2 and 0.8; the clipped branch is the larger in both."""
    new_BR = torch.log(torch.tensor([[2.0, 0.5]]))
    terms = clipped_surrogate(new_BR, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2).bool(), 0.2)
    close(terms.loss_sum, -0.4)
    close(terms.sums["clip_fraction"], 2.0)


def test_dual_clip_bounds_a_negative_advantage_by_hand() -> None:
    """r = 10, A = -1: the plain term is 10; dual clip 3 makes it 3."""
    new_BR = torch.log(torch.tensor([[10.0]]))
    terms = clipped_surrogate(
        new_BR, torch.zeros(1, 1), torch.tensor([[-1.0]]), torch.ones(1, 1).bool(), 0.2, dual_clip=3.0
    )
    close(terms.loss_sum, 3.0)


def test_value_loss_by_hand() -> None:
    """v = 1, v_old = 0, R = 2, clip 0.2: max((1-2)^2, (0.2-2)^2) / 2 = 1.62."""
    terms = clipped_value(torch.tensor([[1.0]]), torch.zeros(1, 1), torch.tensor([[2.0]]), torch.ones(1, 1).bool(), 0.2)
    close(terms.loss_sum, 1.62)


def test_equal_pair_costs_ln_2_and_pulls_nowhere() -> None:
    """Report pytorch/rl#3520: the loss must survive a pair without difference."""
    hidden = torch.tensor([3.0], requires_grad=True)
    terms = bradley_terry(hidden, hidden)
    terms.loss_sum.backward()
    close(terms.loss_sum.detach(), 0.6931471806)
    close(hidden.grad, [0.0])


@pytest.mark.parametrize("values", [[[5.0, 0.0]], [[2.0, 2.0]]], ids=["one element", "equal elements"])
def test_whitening_without_spread_is_finite_and_zero(values: list) -> None:
    """Report huggingface/trl#4662: the std of one element is not to become NaN."""
    mask_BR = torch.tensor([[True, values[0][0] == values[0][1]]])
    close(masked_whiten(torch.tensor(values), mask_BR), [[0.0, 0.0]])


def test_masked_sum_ignores_what_stands_in_padding() -> None:
    close(masked_sum(torch.tensor([1.0, float("inf")]), torch.tensor([True, False])), 1.0)


def test_k3_is_clamped_inside_exp_only() -> None:
    """log-ratio -30: exp(20) - 1 - 30, not exp(30); log-ratio +30: exp(-20) - 1 + 30."""
    close(k3(torch.tensor(-30.0)) / 485165195.40979, (485165195.40979 - 31) / 485165195.40979)
    close(k3(torch.tensor(30.0)), 29.0 + 2.061e-9)


def test_temperature_divides_logits_by_hand() -> None:
    """Report OpenRLHF/OpenRLHF#853. Logits (1, 0) at T = 0.5 are (2, 0): log p(0) = -ln(1 + e^-2)."""
    logprobs_N = token_logprobs(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.tensor([0]), 0.5, 1)
    close(logprobs_N, [-0.1269280110])
