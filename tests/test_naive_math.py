"""The second computation against values worked out elsewhere: by hand, and in ../shared/golden/math.json."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import SHARED

from pipeline.diagnosis import naive_math
from pipeline.diagnosis.naive_math import Token

FILE = SHARED / "golden" / "math.json"
GOLDEN = json.loads(FILE.read_text()) if FILE.is_file() else {"ppo": [], "groups": []}
needs_file = pytest.mark.skipif(not FILE.is_file(), reason="../shared/golden is not beside this checkout")


def test_values_by_hand() -> None:
    assert naive_math.gae([0, 0, 1], [0, 0, 0], 1.0, 0.95) == pytest.approx([0.9025, 0.95, 1.0])
    assert naive_math.token_rewards([0.5, -1.0], 0.1, 2.0) == pytest.approx([-0.05, 2.1])
    assert naive_math.shaped_score(12.0, True, 10.0, 1.5) == 8.5
    assert naive_math.leave_one_out([1.0, 2.0, 6.0]) == pytest.approx([-3.0, -1.5, 4.5])
    assert naive_math.relative([1.0, 3.0]) == pytest.approx([-1.0, 1.0])
    assert naive_math.repetition_penalty([1, 2, 1, 2, 1], 2) == pytest.approx(-0.5)
    assert naive_math.length_penalty([5] * 15, 12) == -3.0
    assert naive_math.reward_to_go([1.0, 0.0, 4.0], 0.5) == pytest.approx([2.0, 2.0, 4.0])
    assert naive_math.importance_weight(-1.0, -3.0) == 2.0
    assert naive_math.learning_rate(0.3, 2, 0) == pytest.approx(0.1)


def test_adam_by_hand() -> None:
    """The first step is lr g / (|g| + 1e-5); with the same gradient again the moments' corrections cancel, and so is the second."""
    adam = naive_math.Adam()
    for _ in range(2):
        change = adam.step({"w": torch.tensor([0.5, -2.0])}, lr=0.1)["w"].tolist()
        assert change == pytest.approx([-0.1 * 0.5 / 0.50001, 0.1 * 2 / 2.00001])
    assert naive_math.clip_factor([torch.tensor([3.0]), torch.tensor([4.0])], 1.0) == pytest.approx(0.2)


def near(found: list[list[float]], golden: list[list[float]]) -> None:
    for mine, theirs in zip(found, golden, strict=True):
        assert mine == pytest.approx(theirs[: len(mine)], abs=1e-7)


@needs_file
@pytest.mark.parametrize("content", GOLDEN["ppo"], ids=lambda content: content["name"])
def test_ppo_case(content: dict) -> None:
    raw, want = content["inputs"], content["expected"]

    def logprobs(name: str) -> list[list[float]]:
        rows = []
        for logits, ids, length in zip(raw[name], raw["response_ids"], raw["lengths"], strict=True):
            tempered = (
                torch.tensor(logits[:length], dtype=torch.float64).view(length, -1 if length else 1)
                / raw["temperature"]
            )
            rows.append(torch.log_softmax(tempered, -1)[range(length), ids[:length]].tolist())
        return rows

    def cut(name: str) -> list[list[float]]:
        return [row[:length] for row, length in zip(raw[name], raw["lengths"], strict=True)]

    old, reference, new = logprobs("logits"), logprobs("ref_logits"), logprobs("new_logits")
    near(old, want["logprobs"])
    pairs = list(zip(old, reference, strict=True))
    kls = {
        e: [[naive_math.kl(*pair, e) for pair in zip(*row, strict=True)] for row in pairs] for e in ("k1", "k2", "k3")
    }
    for estimator, rows in kls.items():
        near(rows, want[estimator])
    scores = [
        naive_math.shaped_score(score, cut_off, 1e6, raw["missing_eos_penalty"])
        for score, cut_off in zip(raw["scores"], raw["truncated"], strict=True)
    ]
    paid = {
        e: [naive_math.token_rewards(*row) for row in zip(kls[e], [raw["kl_coef"]] * len(scores), scores, strict=True)]
        for e in kls
    }
    near(paid["k1"], want["rewards"])
    near(paid["k3"], want["rewards_k3"])
    rewards, values = paid["k1"], cut("values")
    advantages = [naive_math.gae(*row, raw["gamma"], raw["lam"]) for row in zip(rewards, values, strict=True)]
    near(advantages, want["advantages"])
    near([[a + v for a, v in zip(*row, strict=True)] for row in zip(advantages, values, strict=True)], want["returns"])
    to_go = [naive_math.reward_to_go(row, raw["gamma"]) for row in rewards]
    near(to_go, want["reward_to_go"])
    near(naive_math.centred(to_go), want["reward_to_go_minus_batch_mean"])
    whitened = naive_math.whitened(advantages)
    near(whitened, want["whitened_advantages"])

    columns = (new, cut("new_values"), old, values, reference, whitened, advantages, cut("behaviour_logprobs"))
    tokens, weighted = [], []
    for numbers in zip(*([x for row in column for x in row] for column in columns), strict=True):
        *start, raw_advantage, behaviour = numbers
        token = Token(*start, result=raw_advantage + start[3], weight=1.0)
        tokens.append(token)
        weighted.append(replace(token, weight=naive_math.importance_weight(token.old_logprob, behaviour)))

    def policy(some: list[Token], dual_clip: float | None = None) -> float:
        return sum(naive_math.surrogate(token, raw["clip"], dual_clip) for token in some)

    assert policy(tokens) == pytest.approx(want["policy_loss_sum"])
    assert policy(tokens, 3.0) == pytest.approx(want["policy_loss_sum_dual_clip_3"])
    assert policy(weighted) == pytest.approx(want["policy_loss_sum_behaviour_weighted_cap_2"])
    errors = sum(naive_math.value_error(token, raw["clip_value"]) for token in tokens)
    assert errors == pytest.approx(want["value_loss_sum"])


@needs_file
@pytest.mark.parametrize("group", GOLDEN["groups"], ids=lambda group: f"{len(group['rewards'])} groups")
def test_groups(group: dict) -> None:
    near([naive_math.leave_one_out(row) if len(row) > 1 else [0.0] for row in group["rewards"]], group["rloo"])
    near([naive_math.group_relative(row, by_std=True) for row in group["rewards"]], group["grpo"])
    near([naive_math.group_relative(row, by_std=False) for row in group["rewards"]], group["grpo_without_std"])


@needs_file
def test_adaptive_kl() -> None:
    case = GOLDEN["adaptive_kl"]
    kl_coef = case["start"]
    for step in case["steps"]:
        kl_coef = naive_math.next_kl_coef(kl_coef, step["kl"], case["target_kl"], step["n"], case["horizon"])
        assert kl_coef == pytest.approx(step["kl_coef_after"], rel=1e-12)
