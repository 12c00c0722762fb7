"""The development prompts during PPO: answered now and then with the same noise, to see where the policy goes and to keep the best.

The rewards seen here are those that PPO climbs. Where they rise while the judge, which `evaluate` asks later, falls,
the reward model is being exploited: that is the curve of proxy against judge over KL (Gao et al. 2023).

Axes: B answers, R response tokens.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.classifier import Scorer
from pipeline.comparison import Answers, figures, kl_figures
from pipeline.data.examples import sequences
from pipeline.files import write_text
from pipeline.params.ppo import PPOParams
from pipeline.statistics import mean_rate, wins

ANSWERS = Path("artifacts/development/answers.jsonl")


@dataclass(frozen=True)
class WatchedAnswer:
    """What the policy answered to a development prompt after `step` iterations. An end token stands after a cut answer too."""

    step: int
    prompt_ids: list[int]
    response_ids: list[int]
    answer: str
    reward: float
    kl: float


class Development:
    """Answers the development prompts before the first iteration, after every `watch_every` and after the last.

    sample: what the policy answers now, and the k1 to the reference of each answer.
    parameters: what PPO trains; put back by `restore_kept`.
    """

    def __init__(
        self,
        sample: Callable[[], tuple[Answers, Tensor]],
        parameters: list[nn.Parameter],
        end_id: int,
        cfg: PPOParams,
        log: Callable[[int, dict[str, float]], None],
    ):
        self.sample = sample
        self.parameters = parameters
        self.end_id = end_id
        self.cfg = cfg
        self.log = log
        self.answers: list[WatchedAnswer] = []
        self.figures: dict[int, dict[str, float]] = {}
        self.kept_step = 0
        self._kept: list[Tensor] = []
        self._kept_reward: float | None = None

    def __call__(self, step: int) -> None:
        """After `step` iterations; once, although a process that goes on where another was stopped comes by again."""
        if step in self.figures or (step % self.cfg.watch_every and step != self.cfg.iterations):
            return
        found, kl_B = self.sample()
        now = figures(found) | kl_figures(kl_B, found)
        self.figures[step] = now
        self.answers += _rows(step, found, kl_B, self.end_id)
        self.log(step, {f"development_{name}": value for name, value in now.items()})
        # the copy of sft that PPO starts from is within any budget: if nothing is better, nothing was gained
        within = now["kl_per_sequence_k1"] <= self.cfg.keep_max_kl or step == 0
        best = self._kept_reward is None or now["reward_mean"] > self._kept_reward
        if self.cfg.keep == "last" or (within and best):
            self.kept_step, self._kept_reward = step, now["reward_mean"]
            self._kept = [parameter.detach().clone() for parameter in self.parameters]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: what was seen at each step, and the kept weights."""
        return {
            "answers": [vars(row) for row in self.answers],
            "figures": {str(step): found for step, found in self.figures.items()},
            "kept_step": self.kept_step,
            "kept_reward": self._kept_reward,
            "kept": self._kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.answers = [WatchedAnswer(**row) for row in state["answers"]]
        self.figures = {int(step): found for step, found in state["figures"].items()}
        self.kept_step, self._kept_reward, self._kept = state["kept_step"], state["kept_reward"], state["kept"]

    @torch.no_grad()
    def restore_kept(self) -> None:
        """Puts the kept weights back: with `keep: last` the last, with `best` those of the highest reward within the KL budget."""
        for parameter, kept in zip(self.parameters, self._kept, strict=True):
            parameter.copy_(kept)

    def summary(self) -> dict[str, Any]:
        """Which step was kept, and what was seen at each."""
        return {
            "kept_step": self.kept_step,
            "development": {f"step_{step:04d}": found for step, found in self.figures.items()},
        }

    def write(self, file: Path = ANSWERS) -> None:
        """The answers of all steps, for `evaluate` to show to the judge."""
        write_text(file, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.answers))


def read_watched(file: Path) -> list[WatchedAnswer]:
    """What `Development.write` wrote."""
    return [WatchedAnswer(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def over_optimisation(
    rows: list[WatchedAnswer], judge: Scorer, microbatch_tokens: int, resamples: int, seed: int
) -> list[dict[str, float]]:
    """Per watched step: KL, and what reward model and judge say of the same answers, as means and as wins over step 0."""
    batch = sequences([(row.prompt_ids, row.response_ids) for row in rows])
    judged = judge.score_all(batch, microbatch_tokens)
    steps = torch.tensor([row.step for row in rows])
    rewards, kl = torch.tensor([row.reward for row in rows]), torch.tensor([row.kl for row in rows])
    curve = []
    for step in steps.unique().tolist():
        now, start = steps == step, steps == 0
        point = {"step": step, "kl": float(kl[now].mean())}
        for name, scores in (("reward", rewards), ("judge", judged)):
            rate = mean_rate(wins(scores[now], scores[start]), resamples, seed)
            point |= {name: float(scores[now].mean())}
            point |= {f"wins_{name}{suffix}": value for suffix, value in _named(rate.as_dict())}
        curve.append(point)
    return curve


def _named(rate: dict[str, float]) -> list[tuple[str, float]]:
    return [("", rate["mean"]), ("_low", rate["low"]), ("_high", rate["high"])]


def _rows(step: int, found: Answers, kl_B: Tensor, end_id: int) -> list[WatchedAnswer]:
    ended = found.rollout.ended(end_id)
    rows = []
    for index, text in enumerate(found.texts):
        start, length = int(ended.prompt_lengths_B[index]), int(ended.lengths_B[index])
        ids = ended.tokens_BT[index, :length].tolist()
        reward, kl = float(found.scores["reward"][index]), float(kl_B[index])
        rows.append(WatchedAnswer(step, ids[:start], ids[start:], text, reward, kl))
    return rows
