"""Which policy PPO keeps, and the curve of reward model against judge, with made-up answers."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from pipeline.batch import Rollout, Sequences
from pipeline.comparison import Answers
from pipeline.development import Development, WatchedAnswer, over_optimisation, read_watched
from pipeline.params.ppo import PPOParams
from pipeline.params.section import read_params

END = 9
SMOKE = read_params(ROOT / "recipes" / "smoke.yaml")["ppo"]


def answers(reward: float) -> Answers:
    """Two answers to two prompts, the second one cut; both with this reward."""
    rollout = Rollout(
        tokens_BT=torch.tensor([[1, 2, 5, END, 0], [1, 2, 3, 6, 7]]),
        prompt_lengths_B=torch.tensor([2, 3]),
        response_lengths_B=torch.tensor([2, 2]),
        behaviour_logprobs_BR=torch.zeros(2, 2),
        truncated_B=torch.tensor([False, True]),
        prompt_ids_B=torch.tensor([11, 12]),
    )
    return Answers(rollout, ["five", "six seven"], {"reward": torch.full((2,), float(reward))})


def watched_run(rewards: list[float], kls: list[float], **changes) -> tuple[Development, list[float], list[int]]:
    """PPO whose one weight is its step: what was kept, the weight put back, and the steps that were logged."""
    cfg = PPOParams(**SMOKE | {"iterations": len(rewards) - 1} | changes)
    weight = nn.Parameter(torch.zeros(1))
    step = 0

    def sample() -> tuple[Answers, Tensor]:
        return answers(rewards[step]), torch.full((2,), float(kls[step]))

    logged: list[int] = []
    development = Development(sample, [weight], END, cfg, lambda at, _: logged.append(at))
    for step in range(len(rewards)):
        weight.data.fill_(float(step))
        development(step)
    development.restore_kept()
    return development, weight.tolist(), logged


def test_best_is_the_highest_reward_within_the_kl_budget() -> None:
    development, weight, _ = watched_run([0, 1, 3, 2, 9], [0, 1, 2, 4, 20], keep="best", keep_max_kl=5.0, watch_every=1)
    assert (development.kept_step, weight) == (2, [2.0])


def test_last_is_the_last_whatever_it_is() -> None:
    development, weight, _ = watched_run([0, 3, -5], [0, 1, 99], keep="last", keep_max_kl=5.0, watch_every=1)
    assert (development.kept_step, weight) == (2, [2.0])


def test_where_nothing_is_gained_the_copy_of_sft_is_kept() -> None:
    development, weight, _ = watched_run([0, 5, -1], [0, 6, 1], keep="best", keep_max_kl=5.0, watch_every=1)
    assert (development.kept_step, weight) == (0, [0.0])


def test_it_looks_before_the_first_every_so_many_and_after_the_last() -> None:
    _, _, logged = watched_run([0, 1, 2, 3, 4, 5], [0] * 6, keep="best", watch_every=2)
    assert logged == [0, 2, 4, 5]


def test_answers_come_back_from_the_file_with_an_end_token_after_cut_ones(tmp_path: Path) -> None:
    development, _, _ = watched_run([0.5, 1.5], [0, 0.25], keep="last", watch_every=1)
    development.write(tmp_path / "answers.jsonl")
    assert read_watched(tmp_path / "answers.jsonl") == [
        WatchedAnswer(0, [1, 2], [5, END], "five", 0.5, 0.0),
        WatchedAnswer(0, [1, 2, 3], [6, 7, END], "six seven", 0.5, 0.0),
        WatchedAnswer(1, [1, 2], [5, END], "five", 1.5, 0.25),
        WatchedAnswer(1, [1, 2, 3], [6, 7, END], "six seven", 1.5, 0.25),
    ]


class ShortAnswers:
    """A judge that likes short answers."""

    def score_all(self, batch: Sequences, microbatch_tokens: int) -> Tensor:
        return -batch.response_lengths_B.float()


def test_the_curve_shows_where_the_judge_stops_following() -> None:
    """Step 3 has the higher reward, but one answer grew from 1 token to 3: judge's wins are a tie and a loss, 0.25."""
    rows = [
        WatchedAnswer(0, [1], [2], "a", reward=0.0, kl=0.0),
        WatchedAnswer(0, [1], [2, 3], "b", reward=1.0, kl=0.0),
        WatchedAnswer(3, [1], [2, 3, 4], "c", reward=2.0, kl=4.0),
        WatchedAnswer(3, [1], [2, 3], "d", reward=1.5, kl=2.0),
    ]
    start, end = over_optimisation(rows, ShortAnswers(), 2, resamples=100, seed=0)
    assert (start["step"], start["kl"], start["wins_judge"]) == (0, 0.0, 0.5)
    assert (end["step"], end["kl"], end["reward"]) == (3, 3.0, 1.75)
    assert end["judge"] == pytest.approx(-2.5)
    assert (end["wins_reward"], end["wins_judge"]) == (1.0, 0.25)
    assert end["wins_judge_low"] <= end["wins_judge"] <= end["wins_judge_high"]
