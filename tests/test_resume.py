"""A straight run and one that was stopped at any place give the same bytes: weights, heads, curves."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import PROMPTS, SAMPLING, World, lengths_B, ppo_params

from pipeline import interruption
from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Batch, Pairs, Rollout
from pipeline.checkpoint import read_checkpoint
from pipeline.comparison import Answers
from pipeline.data.examples import epochs_of, sequences
from pipeline.development import Development
from pipeline.errors import TrainingError
from pipeline.evaluation import Score
from pipeline.heads import reward_head
from pipeline.interruption import Interrupted
from pipeline.objectives.offline import bradley_terry, dpo, sft
from pipeline.objectives.terms import Terms
from pipeline.offline import train_offline
from pipeline.online import optimizer_for, prompts_in_turn, train_online
from pipeline.params.base import LoraParams
from pipeline.preferences import PairPolicy, with_reference
from pipeline.randomness import RandomStates
from pipeline.recovery import Recovery
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import generate
from pipeline.update import Optimizer, ParameterGroup, Rehearsal, cosine_to_tenth, finite
from pipeline.weights import hash_tensors

DROPOUT = LoraParams(r=4, alpha=8.0, dropout=0.3, targets="all-linear")
ROWS = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, 2][n % 3 :]) for n in range(7)])
OTHERS = sequences([([5 + n] * (2 + n % 4), [140 + n, 160 + n, 2][n % 2 :]) for n in range(7)])
PAIRS = Pairs(ROWS, OTHERS)
Run = Callable[..., str]
"""A whole training in a world of its own; a hash of all that it leaves."""


class Curves:
    """What Stage does with figures."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, step: int, stats: dict[str, float], *_: object) -> None:
        self.rows.append({"step": step, **finite(stats)})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Copying(Recovery):
    """Keeps a copy of every checkpoint in a folder of its own."""

    def save(self) -> str | None:
        told = super().save()
        number = self._last.number
        shutil.copytree(self.folder / f"step-{number:06d}", self.folder / f"of_{number}" / f"step-{number:06d}")
        return told


def recovery(folder: Path, kind: type[Recovery] = Recovery, every: int = 1, **keys: Any) -> Recovery:
    settings = {"made_under": {}, "flush": lambda: None} | keys
    return kind("test", folder, every, 1e9, **settings).hold(random=RandomStates())


def leaves(backbone: Backbone, adapter: str, optimizer: Optimizer, curves: Curves, *more: object) -> str:
    """Weights, heads, curves, and whatever else."""
    weights = {str(index): parameter for index, parameter in enumerate(optimizer.parameters)}
    return " ".join([backbone.adapter_hash(adapter), hash_tensors(weights), json.dumps([curves.rows, *more])])


def offline(make_backbone: Callable[..., Backbone], stage: str, tmp_path: Path) -> Run:
    """Two epochs over seven rows in batches of three: six steps."""
    start = make_backbone(lora=DROPOUT)
    start.save_adapter("sft", tmp_path / "sft")

    def run(recovery: Recovery, hook: Callable[[Optimizer], None] = lambda _: None) -> str:
        torch.manual_seed(1)  # as a stage does at its start
        backbone = make_backbone(adapters=())
        torch.manual_seed(1)
        for name in ("sft", "mine"):
            backbone.load_adapter(name, tmp_path / "sft")
        policy = Policy(backbone, "mine", 1.0, 16)
        groups = [ParameterGroup("adapter", backbone.train("mine"), 1e-2)]
        data: Batch = PAIRS
        if stage == "sft":
            model, data = policy, ROWS
        elif stage == "reward":
            head = reward_head(backbone.hidden_size)
            model = RewardModel(backbone, "mine", head)
            groups.append(ParameterGroup("head", [head.linear.weight], 1e-2))
        else:
            model = PairPolicy(policy)
            data = with_reference(PAIRS, Policy(backbone, "sft", 1.0, 16), 3, 4, 14)

        def objective(output: Any, batch: Any) -> Terms:
            hook(optimizer)
            if stage == "sft":
                return sft(output.logprobs_BR, batch.response_mask_BR)
            if stage == "reward":
                return bradley_terry(*output, 0.0, 0.0)
            return dpo(*output, batch.ref_chosen_B, batch.ref_rejected_B, 0.1)

        optimizer = Optimizer(groups, 1.0, cosine_to_tenth(6, 0.2))
        curves = Curves()
        dropout = stage != "dpo"
        train_offline(
            model, epochs_of(data, 3, 2, 4), optimizer, objective, 14, dropout, curves.log, recovery.hold(curves=curves)
        )
        return leaves(backbone, "mine", optimizer, curves)

    return run


def online(make_backbone: Callable[..., Backbone], algorithm: str, score: Score = lengths_B) -> Run:
    """Two iterations of two epochs over two minibatches, with everything on that has a state."""
    settings = {"group_size": 4, "watch_every": 1, "keep": "best", "keep_max_kl": 100.0, "stop_kl": None}
    settings |= {"kl_target": 0.5, "kl_horizon": 50, "normalize_scores": True, "ptx_coef": 0.5, "algorithm": algorithm}
    if algorithm in ("ppo", "reinforce"):
        settings |= {"critic_warmup": 1} if algorithm == "ppo" else {}
    cfg = ppo_params(**settings)

    def run(recovery: Recovery, hook: Callable[[Optimizer], None] = lambda _: None) -> str:
        random.seed(1), np.random.seed(1)
        world = World(make_backbone, cfg)
        if algorithm != "ppo":
            world.policy.value_head = None
        optimizer = optimizer_for(world.policy, cfg)
        curves, seen = Curves(), []

        def drawing(rollout: Rollout) -> Tensor:
            """As a user's function may: from generators that nobody has keyed."""
            hook(optimizer)
            return score(rollout) + random.random() + float(np.random.rand())

        def sample() -> tuple[Answers, Tensor]:
            rollout = generate(world.policy, PROMPTS[:3], SAMPLING, step=0)
            return Answers(rollout, ["a", "b", "c"], {"reward": lengths_B(rollout)}), torch.full((3,), 0.5)

        development = Development(sample, optimizer.parameters, 2, cfg, lambda step, _: seen.append(step))
        train_online(
            world.policy,
            world.reference,
            drawing,
            prompts_in_turn(PROMPTS, cfg, 3),
            optimizer,
            algorithm_of(cfg),
            cfg,
            SAMPLING,
            100,
            curves.log,
            development,
            Rehearsal(Policy(world.backbone, "policy", 1.0, 16), ROWS, cfg.ptx_coef),
            recovery.hold(curves=curves, development=development),
        )
        last = leaves(world.backbone, "policy", optimizer, curves, [vars(answer) for answer in development.answers])
        development.restore_kept()
        return last + leaves(world.backbone, "policy", optimizer, curves, development.summary())

    return run


def resumed_everywhere(
    run: Run, tmp_path: Path, only: Callable[[int], bool] = lambda _: True
) -> Iterator[tuple[int, bool]]:
    """For every place of a straight run: whether a fresh world that goes on from there ends the same."""
    straight = run(recovery(tmp_path / "straight", Copying))
    for place in sorted((tmp_path / "straight").glob("of_*"), key=lambda place: int(place.name[3:])):
        if only(int(place.name[3:])):
            torch.manual_seed(99), random.seed(99), np.random.seed(99)
            yield int(place.name[3:]), run(recovery(place, every=10**6)) == straight


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_supervised_stages_go_on_from_any_step(
    make_backbone: Callable[..., Backbone], tmp_path: Path, stage: str
) -> None:
    """Report NVIDIA-NeMo/RL#3171, with dropout on where the stage has it: six steps, stopped after each."""
    run = offline(make_backbone, stage, tmp_path)
    assert list(resumed_everywhere(run, tmp_path)) == [(number, True) for number in range(1, 7)]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "rloo", "grpo"])
def test_reinforcement_goes_on_from_any_place(
    make_backbone: Callable[..., Backbone], tmp_path: Path, algorithm: str
) -> None:
    """Reports NVIDIA-NeMo/RL#3171 and huggingface/trl#1650 (the value head is among the weights): inside an iteration too,
    with the rollout and half an update done. KL controller, running moments, rehearsal and the kept best go on."""
    run = online(make_backbone, algorithm)
    places = 2 * (1 + 4 + 1)
    only = (lambda _: True) if algorithm == "ppo" else (lambda number: number in (1, 4, 6, 9))
    assert list(resumed_everywhere(run, tmp_path, only)) == [
        (number, True) for number in range(1, places + 1) if only(number)
    ]


@pytest.mark.parametrize(("microbatch", "done"), [(1, 0), (2, 1), (4, 2), (5, 3), (6, 3), (9, 5)])
def test_a_signal_in_the_middle_of_a_step_costs_nothing(
    make_backbone: Callable[..., Backbone], tmp_path: Path, microbatch: int, done: int
) -> None:
    """Dropout has drawn from its generator, gradients are half summed: the state of the last step is what is written.

    Seven rows in batches of three: steps of 2, 2, 1, 2, 2, 1 micro-batches.
    """
    run = offline(make_backbone, "sft", tmp_path)
    straight = run(recovery(tmp_path / "straight", every=10**6))
    calls = count(1)

    def killed(_: Optimizer) -> None:
        if next(calls) == microbatch:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = recovery(tmp_path / "stopped", every=10**6)
    with interruption.listening(), pytest.raises(Interrupted, match="SIGTERM"):
        run(stopped, killed)
    told = stopped.save()
    assert told == (f"after step {done}, which is kept in {tmp_path / 'stopped'}" if done else None)
    assert run(recovery(tmp_path / "stopped")) == straight


@pytest.mark.parametrize("score_call", [1, 2])
def test_a_signal_in_a_rollout_or_its_evaluation_costs_the_rollout_alone(
    make_backbone: Callable[..., Backbone], tmp_path: Path, score_call: int
) -> None:
    """Scores have been drawn from generators and merged into the running moments; neither may be seen on resume."""
    run = online(make_backbone, "ppo")
    straight = run(recovery(tmp_path / "straight", every=10**6))
    calls = count(1)

    def killed(_: Optimizer) -> None:
        if next(calls) == score_call:
            interruption.wait_for_polls()
            os.kill(os.getpid(), signal.SIGINT)

    stopped = recovery(tmp_path / "stopped", every=10**6)
    with interruption.listening(), pytest.raises(Interrupted, match="SIGINT"):
        run(stopped, killed)
    stopped.save()
    # the next poll is in the update: the rollout is evaluated by then, which is the 1st, or after 1 + 4 + 1 the 7th place
    assert [place.name for place in (tmp_path / "stopped").glob("step-*")] == [f"step-00000{6 * score_call - 5}"]
    assert run(recovery(tmp_path / "stopped")) == straight


def flip(file: Path) -> None:
    """One bit of the byte in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_of_damaged_checkpoints_the_one_before_is_used_and_without_one_the_start(
    make_backbone: Callable[..., Backbone], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = offline(make_backbone, "sft", tmp_path)
    folder = tmp_path / "run"
    straight = run(recovery(folder))
    assert sorted(place.name for place in folder.iterdir()) == ["step-000005", "step-000006"]
    flip(folder / "step-000006" / "state.safetensors")
    capsys.readouterr()
    assert run(recovery(folder, every=10**6)) == straight
    said = capsys.readouterr().out
    assert "step-000006/state.safetensors has other bytes than were written. It is not used." in said
    assert f"test: goes on after step 5, from {folder}." in said
    (folder / "step-000005" / "manifest.json").unlink()
    assert run(recovery(folder, every=10**6)) == straight
    assert "test: no checkpoint is sound: it starts from the beginning." in capsys.readouterr().out


def test_a_checkpoint_is_due_after_so_many_steps_or_so_much_time(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    run = offline(make_backbone, "sft", tmp_path)
    run(recovery(tmp_path / "steps", every=4))
    assert [place.name for place in (tmp_path / "steps").iterdir()] == ["step-000004"]
    now = count(start=0, step=10)  # asked once at the start, once at each step, once after each checkpoint
    timed = Recovery("test", tmp_path / "time", 10**6, 25, {}, lambda: None, clock=lambda: float(next(now)))
    run(timed.hold(random=RandomStates()))
    assert sorted(place.name for place in (tmp_path / "time").iterdir()) == ["step-000003", "step-000006"]


def test_what_may_change_the_last_bits_is_said(
    make_backbone: Callable[..., Backbone], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = offline(make_backbone, "sft", tmp_path)
    for threads in ("2", "4"):
        run(
            Recovery("test", tmp_path / "run", 4, 1e9, {"runtime.threads": threads}, lambda: None).hold(
                r=RandomStates()
            )
        )
    assert "runtime.threads was 2 until there and is 4 now: the last bits may differ." in capsys.readouterr().out


def test_nan_in_a_gradient_fails_with_the_last_good_checkpoint(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    """Report MakazhanAlpamys/Soup#532. From the third step on every gradient is NaN: three such steps, and it ends."""
    run = offline(make_backbone, "sft", tmp_path)
    calls = count(1)

    def poisoned(optimizer: Optimizer) -> None:
        if next(calls) == 5:  # the third step's only micro-batch
            optimizer.parameters[0].register_hook(lambda gradient: gradient * float("nan"))

    stopped = recovery(tmp_path / "run", every=10**6)
    with pytest.raises(TrainingError, match=r"not finite 3 steps in a row \(loss \d.*Lower the learning rate"):
        run(stopped, poisoned)
    assert stopped.save() == f"after step 4, which is kept in {tmp_path / 'run'}"
    state = read_checkpoint(tmp_path / "run" / "step-000004", ["random", "curves", "optimizer"]).state
    assert state["optimizer"]["non_finite_in_a_row"] == 2
    assert all(torch.isfinite(weight).all() for weight in state["optimizer"]["weights"]["adapter"])


def test_nan_in_a_score_fails_with_the_last_good_checkpoint(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    """From the second rollout on scores are NaN: nothing is learnt from them, and the first iteration is not lost."""
    calls = count(1)
    run = online(
        make_backbone, "ppo", score=lambda rollout: lengths_B(rollout) * (float("nan") if next(calls) == 2 else 1)
    )
    stopped = recovery(tmp_path / "run", every=10**6)
    with pytest.raises(TrainingError, match="A score is not finite: nothing is learnt from it"):
        run(stopped)
    assert stopped.save() == f"after iteration 1, which is kept in {tmp_path / 'run'}"
    parts = ["random", "curves", "development", "optimizer", "place", "normalize"]
    state = read_checkpoint(tmp_path / "run" / "step-000006", parts).state
    assert state["normalize"]["count"] == 8  # the first rollout's scores alone
