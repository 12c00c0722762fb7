"""CartPole by the functions of RLHF: it is learnt, it is not learnt with wrong advantages, and time-limits are no falls."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, runtime
from torch import Tensor, nn

from pipeline import warmup_summary
from pipeline.cartpole import ActorCritic, Episodes, cartpoles, greedy, rollout
from pipeline.errors import ParameterError
from pipeline.params.section import load_section, parse_section, read_params
from pipeline.params.warmup import WarmupParams
from pipeline.stage import Stage
from pipeline.tracking.tracker import Tracker
from pipeline.warmup import METHODS, Method, evaluate, ppo, reinforce, train
from stages.warmup import warmup

CFG = load_section("warmup", WarmupParams, ROOT / "recipes" / "demo.yaml")
SHORT = CFG.model_copy(update={"iterations": 10})


def curve(method: Method, cfg: WarmupParams = SHORT, seed: int = 1) -> list[dict[str, float]]:
    """What training logs, iteration by iteration."""
    history: list[dict[str, float]] = []
    torch.set_num_threads(1)
    train(method, cfg, seed, lambda step, stats: history.append(stats))
    return history


def with_advantages(method: Method, change: Callable[[Tensor], Tensor]) -> Method:
    """The method with its advantages made wrong."""

    def advantages(*given: Tensor) -> tuple[Tensor, Tensor]:
        advantages_BR, returns_BR = method.advantages(*given)
        return change(advantages_BR), returns_BR

    return replace(method, advantages=advantages)


def test_ppo_learns_and_its_ratio_starts_at_one() -> None:
    """A policy that pushes at random keeps the pole up for 22 steps on average."""
    history = curve(ppo(SHORT))
    assert history[0]["return_mean"] < 40
    assert max(stats["return_mean"] for stats in history[-3:]) > 120
    assert all(stats["first_log_ratio_max"] < 1e-5 for stats in history)


def test_reinforce_learns() -> None:
    cfg = CFG.model_copy(update={"iterations": 14, "lr": 1e-2})
    assert max(stats["return_mean"] for stats in curve(reinforce(cfg), cfg)[-3:]) > 90


@pytest.mark.parametrize("change", [torch.neg, torch.zeros_like], ids=["sign flipped", "zero"])
def test_ppo_does_not_learn_from_wrong_advantages(change: Callable[[Tensor], Tensor]) -> None:
    history = curve(with_advantages(ppo(SHORT), change))
    assert max(stats["return_mean"] for stats in history) < 40


class FirstNumber(nn.Module):
    """A critic whose value is the first number of the observation."""

    def forward(self, observations: Tensor) -> Tensor:
        return observations[..., :1]


def two_episodes() -> Episodes:
    """Values 2 and 4 before the two steps and 8 after them, 1 paid for each; the first ends in a fall, the second in time."""
    observations_BRO = torch.zeros(2, 2, 4)
    observations_BRO[..., 0] = torch.tensor([2.0, 4.0])
    after_BO = torch.zeros(2, 4)
    after_BO[:, 0] = 8.0
    steps_B, fell_B = torch.tensor([2, 2]), torch.tensor([True, False])
    return Episodes(observations_BRO, torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2), steps_B, fell_B, after_BO)


def test_a_time_limit_is_bootstrapped_and_a_fall_is_not() -> None:
    """gamma 0.5, lambda 1: returns are 1 and 1 + 0.5 * 1 after the fall; 1 + 0.5 * 8 and 1 + 0.5 * 5 where time was up."""
    cfg = CFG.model_copy(update={"gamma": 0.5, "lam": 1.0})
    policy = ActorCritic(1, with_critic=True)
    policy.critic = FirstNumber()
    experience = evaluate(two_episodes(), policy, ppo(cfg))
    assert experience.values_BR.tolist() == [[2, 4], [2, 4]]
    assert experience.returns_BR.tolist() == [[1.5, 1], [3.5, 5]]
    # returns less values are -0.5, -3, 1.5, 1: mean -0.25, variance 3.0625 = 1.75 squared
    wanted = torch.tensor([[-0.25, -2.75], [1.75, 1.25]]) / 1.75
    torch.testing.assert_close(experience.advantages_BR, wanted, rtol=1e-6, atol=1e-6)


def test_without_a_critic_nothing_is_said_of_what_would_have_come() -> None:
    cfg = CFG.model_copy(update={"gamma": 0.5})
    experience = evaluate(two_episodes(), ActorCritic(1, with_critic=False), reinforce(cfg))
    assert experience.returns_BR.tolist() == [[1.5, 1], [1.5, 1]]


class Scripted:
    """Two environments that see the number of the step; the first falls at step 1, the second's time is up at step 3."""

    num_envs = 2

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        self.step_number = 0
        return np.zeros((2, 4), dtype=np.float32), {}

    def step(self, actions_B: np.ndarray) -> tuple:
        self.step_number += 1
        after_BO = np.full((2, 4), self.step_number, dtype=np.float32)
        fell_B = np.array([self.step_number in (1, 3), False])
        time_up_B = np.array([False, self.step_number == 3])
        return after_BO, np.ones(2), fell_B, time_up_B, {}


def test_an_episode_ends_where_it_ends_and_what_comes_after_does_not_count() -> None:
    """The environments begin again by themselves, and the first falls again."""
    episodes = rollout(ActorCritic(1, with_critic=False), Scripted(), 1, greedy)
    assert episodes.steps_B.tolist() == [1, 3]
    assert episodes.mask_BR.tolist() == [[True, False, False], [True, True, True]]
    assert episodes.rewards_BR.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert episodes.terminated_B.tolist() == [True, False]
    assert episodes.last_observations_BO[:, 0].tolist() == [1, 3]
    assert episodes.observations_BRO[1, :, 0].tolist() == [0, 1, 2]
    short = episodes.select(torch.tensor([0]))
    assert (short.actions_BR.shape, short.observations_BRO.shape) == ((1, 1), (1, 1, 4))
    assert (short.num_terms, episodes.num_terms) == (1, 4)


def test_the_environment_ends_at_500_and_calls_that_no_fall() -> None:
    """A controller by hand: push to where the pole leans and moves, a little against the cart's own drift."""
    policy = ActorCritic(1, with_critic=False)
    policy.actor = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        policy.actor.weight.copy_(torch.tensor([[0.0] * 4, [0.1, 0.3, 2.0, 1.0]]))
    episodes = rollout(policy, cartpoles(8), 1, greedy)
    assert episodes.steps_B.tolist() == [500] * 8
    assert not episodes.terminated_B.any()


def test_equal_seeds_give_equal_bits() -> None:
    cfg = CFG.model_copy(update={"iterations": 2})
    assert curve(ppo(cfg), cfg) == curve(ppo(cfg), cfg)
    assert curve(ppo(cfg), cfg)[0] != curve(ppo(cfg), cfg, seed=2)[0]


def test_minibatches_are_whole() -> None:
    content = read_params(ROOT / "params.yaml")["warmup"] | {"minibatch_size": 6}
    with pytest.raises(ParameterError) as error:
        parse_section("warmup", WarmupParams, content)
    assert str(error.value) == "warmup.minibatch_size is 6 but must divide warmup.episodes 16; try 4."


def test_stage_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    shutil.copy(ROOT / "recipes" / "smoke.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    warmup(Stage("warmup", "warmup", 1, runtime(), Tracker()))
    metrics = json.loads(Path("metrics/warmup.json").read_text())
    assert set(metrics) == set(METHODS) == set(warmup_summary.NAMES)
    assert 1 <= metrics["ppo"]["seed_1"]["sampled_min"] <= metrics["ppo"]["seed_1"]["sampled_mean"] <= 500
    rows = Path("plots/warmup.tsv").read_text().splitlines()
    assert len(rows) == 1 + 3 and {"episodes", *METHODS} <= set(rows[0].split("\t"))
    warmup_summary.main()
    shown = capsys.readouterr().out
    assert "REINFORCE, no baseline" in shown and "48 episodes" in shown
    assert warmup_summary.PICTURE.stat().st_size > 10_000


def test_small_curve_goes_from_0_to_500_and_stays_small() -> None:
    assert warmup_summary.small_curve([0, 500]) == "▁█"
    assert warmup_summary.small_curve([0.0] * 60) == "▁" * 30
