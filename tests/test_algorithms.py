"""Advantages against loops written from the papers; each algorithm learns what it can, and with a fault planted it does not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import get_args

import pytest
import torch
from torch import Tensor

from benchmarks.algorithms import learn, learnt, write_model
from pipeline.algorithms import ALGORITHMS, Algorithm, Estimate, algorithm_of
from pipeline.params.ppo import GROUPED, PPOParams
from pipeline.params.section import read_params
from pipeline.tensors import length_mask

ROOT = Path(__file__).parent.parent
DEMO_PPO = read_params(ROOT / "recipes" / "demo.yaml")["ppo"]


def params(**changes) -> PPOParams:
    return PPOParams(**(DEMO_PPO | changes))


def test_the_table_and_the_parameter_name_the_same_algorithms() -> None:
    assert get_args(PPOParams.model_fields["algorithm"].annotation) == tuple(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_ppo_has_a_critic_and_only_grpo_a_kl_loss(name: str) -> None:
    algorithm = algorithm_of(params(algorithm=name))
    assert (algorithm.critic_objective is not None) == (name == "ppo")
    assert (algorithm.kl_loss is not None) == (name == "grpo")
    assert algorithm.reward_kl_coef == (0.0 if name == "grpo" else DEMO_PPO["kl_coef"])


# --- advantages against loops ---


def ragged(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask of rows of 1 to 9 tokens; padding holds numbers in the values, zeros in the rewards."""
    generator = torch.Generator().manual_seed(rows)
    lengths_B = torch.randint(1, 10, (rows,), generator=generator)
    mask_BR = length_mask(lengths_B, int(lengths_B.max()))
    rewards_BR = torch.randn(mask_BR.shape, generator=generator) * mask_BR
    return rewards_BR, torch.randn(mask_BR.shape, generator=generator), mask_BR


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """(x - mean) / sqrt(variance + 1e-8) over all numbers."""
    numbers = [number for row in rows for number in row]
    mean, spread = fmean(numbers), (pstdev(numbers) ** 2 + 1e-8) ** 0.5
    return [[(number - mean) / spread for number in row] for row in rows]


def assert_rows(actual_BR: Tensor, expected: list[list[float]]) -> None:
    for row, numbers in zip(actual_BR.tolist(), expected, strict=True):
        assert row[: len(numbers)] == pytest.approx(numbers, rel=1e-6, abs=1e-6)
        assert not any(row[len(numbers) :])


def lists(x_BR: Tensor, mask_BR: Tensor) -> list[list[float]]:
    return [x[mask].tolist() for x, mask in zip(x_BR, mask_BR, strict=True)]


@pytest.mark.parametrize("rows", range(1, 65))
def test_gae_equals_the_sum_of_the_paper(rows: int) -> None:
    """Schulman et al. 2016, equation 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    gamma, lam = 0.97, 0.9
    rewards_BR, values_BR, mask_BR = ragged(rows)
    estimate = algorithm_of(params(gamma=gamma, lam=lam)).advantages(rewards_BR, values_BR, mask_BR)
    advantages, returns = [], []
    for r, v in zip(lists(rewards_BR, mask_BR), lists(values_BR, mask_BR), strict=True):
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]
        row = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
        advantages.append(row)
        returns.append([a + b for a, b in zip(row, v, strict=True)])
    assert_rows(estimate.raw_BR, advantages)
    assert_rows(estimate.returns_BR, returns)
    if mask_BR.sum() > 1:
        assert_rows(estimate.advantages_BR, whitened(advantages))


@pytest.mark.parametrize("rows", range(1, 65))
def test_reinforce_is_reward_to_go_with_or_without_its_mean(rows: int) -> None:
    rewards_BR, values_BR, mask_BR = ragged(rows)
    to_go = [[sum(r[t:]) for t in range(len(r))] for r in lists(rewards_BR, mask_BR)]
    numbers = [number for row in to_go for number in row]
    size = fmean(number**2 for number in numbers) ** 0.5
    bare = algorithm_of(params(algorithm="reinforce", baseline="none")).advantages(rewards_BR, values_BR, mask_BR)
    assert_rows(bare.raw_BR, to_go)
    assert_rows(bare.advantages_BR, [[number / size for number in row] for row in to_go])
    less_mean = algorithm_of(params(algorithm="reinforce")).advantages(rewards_BR, values_BR, mask_BR)
    assert_rows(less_mean.raw_BR, [[number - fmean(numbers) for number in row] for row in to_go])
    if len(numbers) > 1:
        assert_rows(less_mean.advantages_BR, whitened(to_go))


def groups_of(rows: int) -> list[int]:
    return [size for size in (2, 3, 4, 8) if rows % size == 0]


@pytest.mark.parametrize(("rows", "size"), [(rows, size) for rows in range(1, 65) for size in groups_of(rows)])
def test_rloo_and_grpo_equal_loops_over_groups(rows: int, size: int) -> None:
    """Ahmadian et al. 2024, section 3: less the mean of the others. Shao et al. 2024, section 4.1.2: (r - mean) / std."""
    rewards_BR, values_BR, mask_BR = ragged(rows)
    totals = [sum(r) for r in lists(rewards_BR, mask_BR)]
    lengths = mask_BR.sum(1).tolist()
    rloo, grpo, centred = [], [], []
    for row, length in enumerate(lengths):
        start = row - row % size
        group = totals[start : start + size]
        others = totals[start:row] + totals[row + 1 : start + size]
        rloo.append([totals[row] - fmean(others)] * length)
        centred.append([totals[row] - fmean(group)] * length)
        grpo.append([(totals[row] - fmean(group)) / (pstdev(group) + 1e-6)] * length)

    def estimate(name: str, **changes) -> Estimate:
        cfg = params(algorithm=name, group_size=size, rollout_size=24, minibatch_size=24, **changes)
        return algorithm_of(cfg).advantages(rewards_BR, values_BR, mask_BR)

    assert_rows(estimate("rloo").advantages_BR, rloo)
    assert_rows(estimate("grpo").advantages_BR, grpo)
    assert_rows(estimate("grpo").raw_BR, centred)
    assert_rows(estimate("grpo", scale_by_std=False).advantages_BR, centred)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rollout_without_spread_pulls_nowhere(name: str) -> None:
    """Report huggingface/trl#4662. Equal answers of one token each; reinforce without a baseline would still push them all."""
    rewards_BR, mask_BR = torch.full((8, 1), 0.1), torch.ones(8, 1).bool()
    estimate = algorithm_of(params(algorithm=name)).advantages(rewards_BR, torch.zeros(8, 1), mask_BR)
    assert estimate.advantages_BR.abs().max() < 1e-3
    if name in GROUPED:
        assert not estimate.advantages_BR.any()


# --- learning ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms")
    write_model(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread(_two_threads_and_a_seed: None) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_learns_what_can_be_learnt(model: Path, name: str) -> None:
    """From about 0.1 to 0.9 of a reward that depends on the prompt and on the position."""
    scores = learn(name, 0, model)
    assert scores[0] < 0.3
    assert learnt(scores)


def spoilt(change: Callable[[Tensor], Tensor]) -> Callable[[Algorithm], Algorithm]:
    """The algorithm with `change` made to its advantages."""

    def spoil(algorithm: Algorithm) -> Algorithm:
        def advantages(*arguments: Tensor) -> Estimate:
            estimate = algorithm.advantages(*arguments)
            return replace(estimate, advantages_BR=change(estimate.advantages_BR))

        return replace(algorithm, advantages=advantages)

    return spoil


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ppo", lambda x_BR: -x_BR),
        ("reinforce", lambda x_BR: x_BR[torch.randperm(len(x_BR))]),
        ("rloo", torch.zeros_like),
        ("grpo", lambda x_BR: -x_BR),
    ],
    ids=["ppo, sign flipped", "reinforce, shuffled", "rloo, zeros", "grpo, sign flipped"],
)
def test_with_wrong_advantages_nothing_is_learnt(model: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    scores = learn(name, 0, model, spoilt(change), iterations=40)
    assert not learnt(scores)
    assert max(scores) < 0.8
