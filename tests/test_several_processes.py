"""Two processes over gloo do what one does on the same batches: samples, updates, figures; and each does its share of the work."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import backbone_in
from several import in_processes
from torch import Tensor, nn
from worlds import SAMPLING, World, ppo_params

from pipeline import processes, ranks
from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Pairs, Rollout, Sequences
from pipeline.data.examples import sequences
from pipeline.evaluation import evaluate, score_normalizer, summarize, summarize_critic
from pipeline.heads import reward_head
from pipeline.objectives.offline import bradley_terry, sft
from pipeline.objectives.terms import Terms
from pipeline.offline import train_offline
from pipeline.out_of_memory import MICROBATCH, reporting
from pipeline.ranks import add_up_gradients
from pipeline.roles import Policy, PolicyOutput, RewardModel
from pipeline.rollout import generate
from pipeline.update import Optimizer, ParameterGroup, Rehearsal, UpdatePlan, accumulate, cosine_to_tenth, update

CLOSE = 1e-5  # what summing up in another order may change in float32
# Seven rows of 3 to 14 tokens: a number that two do not divide, and every row of another length than its neighbours.
ROWS = sequences([([5 + n] * (2 + 3 * n % 7), [40 + n, 60 + n, 70, 80, 90, 2][n % 6 :]) for n in range(7)])
OTHERS = sequences([([5 + n] * (2 + 3 * n % 7), [140 + n, 160 + n, 170, 2][n % 4 :]) for n in range(7)])
PAIRS = Pairs(ROWS, OTHERS)
TOKENS = 24  # of a micro-batch: the widest rows go alone, others two or three together


def rows_seen(backbone: Backbone) -> list[int]:
    """Filled with the number of rows of each forward pass from now on."""
    seen: list[int] = []
    backbone.decoder.register_forward_pre_hook(
        lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    return seen


def weights(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def offline_step(folder: Path, stage: str, **keys: Any) -> dict[str, Any]:
    """One optimizer step on seven rows, or pairs of them."""
    backbone = backbone_in(folder, **keys)
    head = reward_head(backbone.hidden_size)
    groups = [ParameterGroup("adapter", backbone.train("sft"), 1e-3)]
    if stage == "sft":
        model, batch = Policy(backbone, "sft", 1.0, 16), ROWS
        objective = sft_terms
    else:
        model, batch = RewardModel(backbone, "sft", head), PAIRS
        groups.append(ParameterGroup("head", [head.linear.weight], 1e-3))

        def objective(scores: Any, _: Any) -> Any:
            return bradley_terry(*scores, 0.1, 0.0)

    optimizer = Optimizer(groups, 1.0, cosine_to_tenth(1, 0.0))
    seen, figures, before = rows_seen(backbone), {}, weights(optimizer.parameters)
    train_offline(model, [batch], optimizer, objective, TOKENS, False, lambda _, stats: figures.update(stats))
    return {"weights": weights(optimizer.parameters), "before": before, "figures": figures, "rows": sum(seen)}


def sft_terms(output: PolicyOutput, rows: Sequences) -> Terms:
    return sft(output.logprobs_BR, rows.response_mask_BR)


def online_world(folder: Path, algorithm: str, **keys: Any) -> World:
    """With everything on that is made of more than one row: whitening, groups, moments of scores, rehearsal."""
    cfg = ppo_params(
        algorithm=algorithm, normalize_scores=True, stop_kl=None, kl_coef=0.1, rollout_size=6, minibatch_size=3, group_size=2
    )  # fmt: skip
    return World(partial(backbone_in, folder, **keys), cfg, lr=1e-3)


def sampled(folder: Path, **keys: Any) -> dict[str, Any]:
    """Two answers to each of eight prompts of 3 to 24 tokens; and how many rows this process has decoded."""
    world = online_world(folder, "ppo", **keys)
    seen = rows_seen(world.backbone)
    rollout = generate(world.policy, world.prompts, replace(SAMPLING, samples=2, chunk=3), step=0)
    return {"rollout": rollout, "rows": sum(seen)}


def online_step(folder: Path, algorithm: str, rollout: Rollout, **keys: Any) -> dict[str, Any]:
    """Beats 2 and 3 from a given rollout: two epochs of minibatches of three rows, the last one of one row."""
    world = online_world(folder, algorithm, **keys)
    cfg, recipe = world.cfg, algorithm_of(world.cfg)
    seen, before = rows_seen(world.backbone), weights(world.optimizer.parameters)
    experience = evaluate(
        rollout, world.policy, world.reference, world.score, recipe, cfg, TOKENS, score_normalizer(cfg)
    )
    plan = UpdatePlan(2, 3, TOKENS, None)
    rehearsal = Rehearsal(Policy(world.backbone, "policy", 1.0, 16), ROWS, 0.3)
    with world.backbone.training(dropout=False):
        figures = update(world.policy, world.optimizer, experience, recipe.objective, plan, seed=1, rehearsal=rehearsal)
    return {
        "weights": weights(world.optimizer.parameters),
        "before": before,
        "figures": figures | summarize(experience) | summarize_critic(experience),
        "experience": vars(experience),
        "rows": sum(seen),
    }


ALGORITHMS = ("ppo", "reinforce", "rloo", "grpo")


def short_of_memory(folder: Path) -> dict[str, Any]:
    """A pass with gradients and one without, where the second process has no room for more than one row."""
    backbone = backbone_in(folder)
    policy, parameters = Policy(backbone, "sft", 1.0, 16), backbone.train("sft")
    told: list[int] = []

    class Short(Policy):
        def __call__(self, batch: Sequences) -> PolicyOutput:
            if processes.rank() == 1 and len(batch) > 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().__call__(batch)

    short = Short(**vars(policy))
    with reporting(lambda _, limit: told.append(limit)), backbone.training(dropout=False):
        scored = short.logprobs_all(ROWS, 4 * TOKENS)
        stats = MICROBATCH.fit(4 * TOKENS, lambda size: accumulate(short, ROWS, sft_terms, size))
    add_up_gradients(parameters)
    gradients = [parameter.grad.clone() for parameter in parameters]
    return {"told": told, "scored": scored, "stats": stats, "gradients": gradients}


def everything(folder: Path, rollout: Rollout) -> dict[str, dict[str, Any]]:
    """All that is compared, made in one go: starting a process takes longer than its work."""
    return (
        {stage: offline_step(folder, stage) for stage in ("sft", "reward")}
        | {algorithm: online_step(folder, algorithm, rollout) for algorithm in ALGORITHMS}
        | {"samples": sampled(folder), "short": short_of_memory(folder)}
        | {"of_main": ranks.of_main(lambda: os.getpid())}
    )


@pytest.fixture(scope="module")
def made(tiny_folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """By the number of processes, what each of them has."""
    folder, rollout = tiny_folders(), sampled(tiny_folders())["rollout"]
    scratch = tmp_path_factory.mktemp("several")
    return {1: [everything(folder, rollout)], 2: in_processes(2, scratch, everything, folder, rollout)}


TRAINED = ("sft", "reward", *ALGORITHMS)


def test_two_processes_draw_the_samples_that_one_draws(made: dict[int, list[dict]]) -> None:
    alone = made[1][0]["samples"]["rollout"]
    lengths_B = alone.response_lengths_B
    assert len(set(lengths_B.tolist())) > 2, "the answers are to be of several lengths"
    for process in made[2]:
        theirs = process["samples"]["rollout"]
        for name in ("tokens_BT", "prompt_lengths_B", "response_lengths_B", "truncated_B", "prompt_ids_B"):
            assert torch.equal(getattr(theirs, name), getattr(alone, name)), name
        gap_BR = theirs.behaviour_logprobs_BR - alone.behaviour_logprobs_BR
        assert float(gap_BR.abs().max()) < CLOSE


@pytest.mark.parametrize("what", TRAINED)
def test_two_processes_move_the_weights_as_one_does_on_the_double_batch(made: dict[int, list[dict]], what: str) -> None:
    alone, first, second = made[1][0][what], made[2][0][what], made[2][1][what]
    moved = max(
        float((after - before).abs().max()) for after, before in zip(alone["weights"], alone["before"], strict=True)
    )
    assert moved > 50 * CLOSE, "a step that moves nothing would hide a difference"
    for one, mine, other in zip(alone["weights"], first["weights"], second["weights"], strict=True):
        assert float((one - mine).abs().max()) < CLOSE
        assert torch.equal(mine, other), "the processes have parted ways"


@pytest.mark.parametrize("what", TRAINED)
def test_figures_are_those_of_all_rows(made: dict[int, list[dict]], what: str) -> None:
    alone, first, second = (process[what]["figures"] for process in (*made[1], *made[2]))
    assert first == second
    assert first.keys() == alone.keys()
    for name, value in alone.items():
        assert first[name] == pytest.approx(value, rel=1e-4, abs=CLOSE), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whitening_and_returns_are_over_all_rows(made: dict[int, list[dict]], algorithm: str) -> None:
    alone, *others = (process[algorithm]["experience"] for process in (*made[1], *made[2]))
    for process in others:
        for name, values in alone.items():
            assert torch.allclose(process[name].double(), values.double(), rtol=0, atol=CLOSE), name


@pytest.mark.parametrize("what", (*TRAINED, "samples"))
def test_each_process_does_half_of_the_work(made: dict[int, list[dict]], what: str) -> None:
    """Passes over a number of rows that two do not divide have a row for company; prompts of one chunk are read once."""
    alone, *shares = (process[what]["rows"] for process in (*made[1], *made[2]))
    assert 0.9 * alone <= sum(shares)
    assert max(shares) <= 0.7 * alone


def test_where_one_process_is_short_of_memory_all_do_the_pass_again_in_halves(made: dict[int, list[dict]]) -> None:
    alone, *both = (process["short"] for process in (*made[1], *made[2]))
    assert alone["told"] == []
    assert both[0]["told"] == both[1]["told"] != []
    for found in both:
        assert float((found["scored"] - alone["scored"]).abs().max()) < CLOSE
        assert found["stats"] == pytest.approx(alone["stats"], rel=1e-5)
        for mine, one in zip(found["gradients"], alone["gradients"], strict=True):
            assert float((mine - one).abs().max()) < CLOSE


def test_what_is_to_be_done_once_is_done_in_the_main_process(made: dict[int, list[dict]]) -> None:
    first, second = (process["of_main"] for process in made[2])
    assert first == second != made[1][0]["of_main"]
