"""Memory that runs out in a pass: the pass is done again in halves, to the bits of a run that had the smaller size from its start.

Models fail as a GPU does where more than so many rows come at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LORA, runtime
from test_health_log import Tags
from test_resume import ROWS, recovery
from torch import Tensor
from worlds import World, ppo_params

from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Sequences, map_rows
from pipeline.checkpoint import read_checkpoint
from pipeline.data.examples import epochs_of
from pipeline.errors import TrainingError
from pipeline.health.report import HealthLog
from pipeline.objectives.offline import sft
from pipeline.offline import train_offline
from pipeline.out_of_memory import MICROBATCH, ROLLOUT_CHUNK, MemoryLimits, PieceSize, reporting
from pipeline.params.base import LoraParams
from pipeline.roles import Policy, PolicyOutput
from pipeline.stage import Stage
from pipeline.tracking.tracker import Tracker
from pipeline.update import Optimizer, ParameterGroup, Rehearsal, UpdatePlan, cosine_to_tenth, update

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)
PYTHON = MemoryError()
Told = list[tuple[str, int]]


@pytest.fixture
def told() -> Iterator[Told]:
    """What is reported; no limit outlives the test."""
    reports: Told = []
    with reporting(lambda name, limit: reports.append((name, limit))):
        yield reports


def refuse(rows: int, most: int, error: Exception = CUDA) -> None:
    if rows > most:
        raise error


class Cramped(Policy):
    """A policy that has memory for `most` rows; it fails when the forward is done, and dropout has drawn."""

    most = 8
    calls = 0

    def __call__(self, batch: Sequences) -> PolicyOutput:
        output = super().__call__(batch)
        self.calls += 1
        refuse(len(batch), self.most)
        return output


def test_what_did_not_fit_is_halved_and_not_tried_again(told: Told) -> None:
    sizes = []

    def work(size: int) -> str:
        sizes.append(size)
        refuse(size, 3)
        return "done"

    pieces = PieceSize("microbatch_tokens")
    pieces.report = lambda name, limit: told.append((name, limit))
    assert pieces.fit(13, work) == pieces.fit(13, work) == pieces.fit(2, work) == "done"
    assert sizes == [13, 6, 3, 3, 2]
    assert told == [("microbatch_tokens", 6), ("microbatch_tokens", 3)]


@pytest.mark.parametrize("error", [CUDA, CPU, PYTHON], ids=lambda error: type(error).__name__)
def test_at_one_row_the_error_goes_on_and_a_stage_says_what_to_lower(
    told: Told, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingError, match="out of memory"), HealthLog("sft", Tracker(), {}).watching():
        MICROBATCH.fit(4, lambda size: refuse(size, 0, error))
    assert told == [("microbatch_tokens", 2), ("microbatch_tokens", 1)]
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "were halved as far as that goes. Set runtime.base_cache to off, runtime.gradient_checkpointing to true" in said
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("out of memory")]
)
def test_other_errors_pass_at_once(told: Told, error: Exception) -> None:
    tried = []

    def work(size: int) -> None:
        tried.append(size)
        raise error

    with pytest.raises(type(error)) as raised:
        MICROBATCH.fit(8, work)
    assert raised.value is error and tried == [8] and told == []


def test_every_row_of_an_evaluation_is_passed_in_pieces_of_one_size(told: Told) -> None:
    """Rows of 4, 4, 5, 5, 5, 7 and 8 tokens, room for two: 32 tokens a piece take five, 16 take three, 8 take two of 4 or one."""
    seen = []

    def lengths(batch: Sequences) -> tuple[Tensor]:
        refuse(len(batch), 2)
        seen.append(len(batch))
        return (batch.lengths_B,)

    assert map_rows(lengths, ROWS, 32)[0].tolist() == ROWS.lengths_B.tolist()
    assert seen == [2, 1, 1, 1, 1, 1]


def test_a_supervised_run_is_the_run_that_had_the_smaller_size(
    make_backbone: Callable[..., Backbone], told: Told
) -> None:
    """With dropout: seven rows of 4 to 8 tokens in batches of four, room for two rows, as many as 14 tokens can be.

    Weights, figures and the generator's state are equal.
    """

    def run(most: int, size: int) -> tuple[str, list, Tensor, int]:
        with reporting(lambda *report: told.append(report)):
            torch.manual_seed(5)
            backbone = make_backbone(lora=LoraParams(r=4, alpha=8.0, dropout=0.3, targets="all-linear"))
            model = Cramped(backbone, "sft", 1.0, 16)
            model.most = most
            rows: list = []
            optimizer = Optimizer(
                [ParameterGroup("adapter", backbone.train("sft"), 1e-2)], 1.0, cosine_to_tenth(4, 0.2)
            )
            train_offline(
                model,
                epochs_of(ROWS, 4, 2, 4),
                optimizer,
                lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR),
                size,
                dropout=True,
                log=lambda _, stats: rows.append(stats),
            )
            return backbone.adapter_hash("sft"), rows, torch.get_rng_state(), model.calls

    *halved, calls = run(most=2, size=28)
    assert told == [("microbatch_tokens", 14)]
    *small, calls_small = run(most=2, size=14)
    assert halved[:2] == small[:2]
    assert torch.equal(halved[2], small[2])
    assert calls == calls_small + 1  # the pass that did not fit
    assert told == [("microbatch_tokens", 14)]


def test_gradients_of_a_step_broken_off_are_thrown_away(make_backbone: Callable[..., Backbone], told: Told) -> None:
    """Memory runs out among the demonstrations, when the policy's gradients are summed up: those are summed up anew."""

    def weights(size: int) -> list[Tensor]:
        with reporting(lambda *report: told.append(report)):
            world = World(make_backbone, ppo_params(epochs=1, stop_kl=None))
            experience = world.experience(2)
            shown = Cramped(world.backbone, "policy", 1.0, 16)
            shown.most = 2
            plan = UpdatePlan(epochs=1, minibatch_size=4, microbatch_tokens=size, stop_kl=None)
            objective = algorithm_of(world.cfg).objective
            with world.backbone.training(dropout=False):
                update(world.policy, world.optimizer, experience, objective, plan, 1, Rehearsal(shown, ROWS, 0.5))
            return [parameter.detach().clone() for parameter in world.optimizer.parameters]

    halved = weights(28)
    assert told == [("microbatch_tokens", 14)]
    assert all(torch.equal(one, other) for one, other in zip(halved, weights(14), strict=True))


def test_a_rollout_in_halves_has_the_same_answers(make_backbone: Callable[..., Backbone], told: Told) -> None:
    """Noise belongs to its row: eight prompts, room for three."""
    world = World(make_backbone)
    whole = world.rollout()
    decode, rows = world.backbone.decode, []

    def cramped(tokens_BT: Tensor, *rest: Any) -> Tensor:
        refuse(len(tokens_BT), 3)
        rows.append(len(tokens_BT))
        return decode(tokens_BT, *rest)

    world.backbone.decode = cramped
    world.sampling = replace(world.sampling, chunk=8)
    halved = world.rollout()
    assert told == [("rollout_chunk", 4), ("rollout_chunk", 2)]
    assert max(rows) == 2
    assert torch.equal(halved.tokens_BT, whole.tokens_BT)


def test_a_checkpoint_keeps_what_did_not_fit_and_says_so(
    make_backbone: Callable[..., Backbone], tmp_path: Path, told: Told
) -> None:
    backbone = make_backbone(lora=LORA)
    optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 1e-2)], 1.0, cosine_to_tenth(4, 0.2))
    before = recovery(tmp_path, made_under={"runtime.microbatch_tokens": "8"}).hold(memory=MemoryLimits())
    before.resume(optimizer)
    MICROBATCH.fit(8, lambda size: refuse(size, 4))
    before.reached("step 1")
    kept = read_checkpoint(tmp_path / "step-000001", ("optimizer", "random", "memory"))
    assert kept.made_under == {"runtime.microbatch_tokens": "at most 4, as memory ran out"}
    again: Told = []
    with reporting(lambda *report: again.append(report)):
        assert MICROBATCH.limit is None
        recovery(tmp_path).hold(memory=MemoryLimits()).resume(optimizer)
        assert MICROBATCH.limit == 4
        assert MICROBATCH.fit(8, lambda size: size) == 4
    assert again == [("microbatch_tokens", 4)]


def test_a_stage_marks_its_run(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tags()
    stage = Stage("ppo", "ppo", 1, runtime(), tracker, HealthLog("ppo", tracker, {}))
    with reporting(stage.tell_limit):
        MICROBATCH.fit(8, lambda size: refuse(size, 4))
        ROLLOUT_CHUNK.fit(8, lambda size: refuse(size, 4))
    assert tracker.tags == {"microbatch.halved": "4", "rollout_chunk.halved": "4"}
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "ppo: out of memory; runtime.microbatch_tokens is 4 from here on, which may change the last bits."
    )
