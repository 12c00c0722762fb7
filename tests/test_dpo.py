"""DPO: its loss by hand and by a loop, a reference that is asked once and never moves, and what it learns."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import LORA

from pipeline.backbone import Backbone
from pipeline.batch import Pairs, Sequences
from pipeline.data.examples import epochs_of, sequences
from pipeline.objectives.offline import dpo
from pipeline.objectives.terms import Terms
from pipeline.offline import train_offline
from pipeline.preferences import PairPolicy, ReferencedPairs, implicit_gaps, with_reference
from pipeline.roles import Policy
from pipeline.update import Optimizer, ParameterGroup, accumulate, constant_after_warmup

BETA = 0.1
PAIRS = Pairs(
    sequences([([5 + n] * (2 + n % 4), [*range(40 + n, 43 + 2 * n), 2]) for n in range(9)]),
    sequences([([5 + n] * (2 + n % 4), [*range(140 - n, 145 - n), 2][n % 3 :]) for n in range(9)]),
)


def objective(logprobs: tuple[torch.Tensor, torch.Tensor], batch: ReferencedPairs) -> Terms:
    return dpo(*logprobs, batch.ref_chosen_B, batch.ref_rejected_B, BETA)


class World:
    """A policy that is a copy of the reference, and nine pairs of unequal length."""

    def __init__(self, make_backbone: Callable[..., Backbone], folder: Path, batch_size: int = 4, **settings):
        self.backbone = make_backbone(**settings)
        self.backbone.save_adapter("sft", folder)
        self.backbone.load_adapter("dpo", folder)
        self.reference = Policy(self.backbone, "sft", 1.0, 16)
        self.policy = Policy(self.backbone, "dpo", 1.0, 16)
        self.model = PairPolicy(self.policy)
        self.parameters = self.backbone.train("dpo")
        self.batch_size = batch_size
        self.pairs = with_reference(PAIRS, self.reference, batch_size, seed=3, microbatch_tokens=60)

    def train(self, epochs: int, lr: float) -> list[dict[str, float]]:
        history: list[dict[str, float]] = []
        train_offline(
            self.model,
            epochs_of(self.pairs, self.batch_size, epochs, seed=3),
            Optimizer([ParameterGroup("adapter", self.parameters, lr)], 1.0, constant_after_warmup(0)),
            objective,
            60,
            dropout=False,
            log=lambda _, stats: history.append(stats),
        )
        return history


def logprob_by_a_loop(backbone: Backbone, adapter: str, rows: Sequences, row: int) -> float:
    """transformers' own logits, one row alone, token by token."""
    backbone.activate(adapter)
    length, start = int(rows.lengths_B[row]), int(rows.prompt_lengths_B[row])
    with torch.no_grad():
        logits = backbone.causal(input_ids=rows.tokens_BT[row : row + 1, :length]).logits[0]
    total = 0.0
    for place in range(start, length):
        total += float(torch.log_softmax(logits[place - 1], -1)[rows.tokens_BT[row, place]])
    return total


def test_an_untrained_pair_costs_ln_2_and_pulls_with_half_of_beta() -> None:
    """Log-ratios 0: loss -ln sigmoid(0); gradient of the chosen log-probability -beta / 2, of the rejected +beta / 2."""
    chosen_B, rejected_B = torch.tensor([-4.0], requires_grad=True), torch.tensor([-9.0], requires_grad=True)
    terms = dpo(chosen_B, rejected_B, torch.tensor([-4.0]), torch.tensor([-9.0]), BETA)
    terms.loss_sum.backward()
    assert abs(terms.loss_sum.item() - math.log(2)) < 1e-6
    assert (chosen_B.grad.item(), rejected_B.grad.item()) == pytest.approx((-0.05, 0.05), abs=1e-7)
    assert terms.sums["accuracy"] == 0.5  # a tie


def test_sums_by_hand() -> None:
    """beta 0.5. Rewards 0.5 and -0.5, margin 1; then -1 and 0.5, margin -1.5."""
    terms = dpo(
        torch.tensor([-3.0, -6.0]), torch.tensor([-8.0, -2.0]), torch.tensor([-4.0, -4.0]), torch.tensor([-7.0, -3.0]), 0.5
    )  # fmt: skip
    expected = {
        "loss": math.log1p(math.exp(-1.0)) + math.log1p(math.exp(1.5)),
        "accuracy": 1.0,
        "margin": -0.5,
        "reward_chosen": -0.5,
        "reward_rejected": 0.0,
        "logprob_chosen": -9.0,
        "logprob_rejected": -10.0,
    }
    assert {name: float(value) for name, value in terms.sums.items()} == pytest.approx(expected, abs=1e-6)


def test_label_smoothing_has_its_minimum_where_the_labels_are_right_that_often() -> None:
    """Conservative DPO: at sigmoid(margin) = 1 - e nothing pulls. For e = 0.1 that is a margin of ln 9."""
    chosen_B = torch.tensor([math.log(9) / BETA], requires_grad=True)
    dpo(chosen_B, torch.zeros(1), torch.zeros(1), torch.zeros(1), BETA, label_smoothing=0.1).loss_sum.backward()
    assert abs(chosen_B.grad.item()) < 1e-8


def test_a_margin_of_hundreds_stays_finite() -> None:
    """sigmoid would be 0 there, and its logarithm infinite."""
    chosen_B = torch.tensor([-9000.0], requires_grad=True)
    terms = dpo(chosen_B, torch.zeros(1), torch.zeros(1), torch.zeros(1), BETA)
    terms.loss_sum.backward()
    assert (terms.loss_sum.item(), chosen_B.grad.item()) == pytest.approx((900.0, -BETA))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_loss_is_that_of_a_loop(make_backbone: Callable[..., Backbone], tmp_path: Path, family: str) -> None:
    world = World(make_backbone, tmp_path, family=family)
    with torch.no_grad():
        for parameter in world.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with world.backbone.training(dropout=False):
        stats = accumulate(world.model, world.pairs, objective, 100)
    losses, right = 0.0, 0.0
    for row in range(len(PAIRS)):
        ratios = [
            logprob_by_a_loop(world.backbone, "dpo", rows, row) - logprob_by_a_loop(world.backbone, "sft", rows, row)
            for rows in (PAIRS.chosen, PAIRS.rejected)
        ]
        margin = BETA * (ratios[0] - ratios[1])
        losses += math.log1p(math.exp(-margin))
        right += margin > 0
    assert 0 < right < len(PAIRS)
    assert stats["loss"] == pytest.approx(losses / len(PAIRS), abs=1e-5)
    assert stats["accuracy"] == pytest.approx(right / len(PAIRS))


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "float32"), ("nf4", "float32"), ("nf4", "bfloat16")])
def test_at_learning_rate_0_an_implicit_reward_is_exactly_0(
    make_backbone: Callable[..., Backbone], tmp_path: Path, quantization: str, dtype: str
) -> None:
    """In the first epoch, whose passes have the shapes of the reference's; later ones differ by rounding alone."""
    world = World(make_backbone, tmp_path, quantization=quantization, dtype=dtype)
    history = world.train(epochs=2, lr=0.0)
    assert (
        [stats["reward_chosen"] for stats in history[:3]]
        == [stats["reward_rejected"] for stats in history[:3]]
        == [0] * 3
    )
    assert all(stats["loss"] == pytest.approx(math.log(2), abs=1e-7) for stats in history[:3])
    if dtype == "float32":
        assert max(abs(stats["margin"]) for stats in history[3:]) < BETA * 1e-4


def test_the_reference_is_asked_once_and_does_not_move(
    make_backbone: Callable[..., Backbone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(make_backbone, tmp_path, quantization="nf4")
    frozen = world.backbone.adapter_hash("sft"), world.backbone.base_hash()
    asked: list[str | None] = []
    activate = world.backbone.activate
    monkeypatch.setattr(world.backbone, "activate", lambda name: (asked.append(name), activate(name)))
    history = world.train(epochs=8, lr=5e-3)
    assert set(asked) == {"dpo"}
    assert (world.backbone.adapter_hash("sft"), world.backbone.base_hash()) == frozen
    first, last = history[:3], history[-3:]
    assert max(stats["loss"] for stats in last) < min(stats["loss"] for stats in first) / 2
    assert min(stats["accuracy"] for stats in last) == 1
    assert all(stats["non_finite_steps"] == 0 for stats in history)
    before, after = world.backbone.adapter_state("sft"), world.backbone.adapter_state("dpo")
    assert all(not torch.equal(after[key], before[key]) for key in after if "lora_B" in key)


def test_reference_logprobs_come_back_in_the_order_of_the_pairs(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    world = World(make_backbone, tmp_path)
    for rows, found_B in ((PAIRS.chosen, world.pairs.ref_chosen_B), (PAIRS.rejected, world.pairs.ref_rejected_B)):
        expected = [logprob_by_a_loop(world.backbone, "sft", rows, row) for row in range(len(PAIRS))]
        assert found_B.tolist() == pytest.approx(expected, abs=1e-4)


def test_microbatch_tokens_changes_no_gradient(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    world = World(make_backbone, tmp_path)
    gradients = []
    for size in (1000, 60, 1):
        for parameter in world.parameters:
            parameter.grad = None
        with world.backbone.training(dropout=False):
            accumulate(world.model, world.pairs, objective, size)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in world.parameters]))
    for gradient in gradients[1:]:
        # the two answers' gradients through the shared prompt nearly cancel, which leaves fewer digits
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < 3e-6


def test_without_dropout_an_adapter_made_with_it_equals_its_reference(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    backbone = make_backbone(adapters=())
    backbone.add_adapter("sft", LORA.model_copy(update={"dropout": 0.5}))
    for parameter in backbone.adapter_parameters("sft"):
        torch.nn.init.normal_(parameter, std=0.05)
    backbone.save_adapter("sft", tmp_path)
    backbone.load_adapter("dpo", tmp_path)
    reference, policy = (Policy(backbone, name, 1.0, 16) for name in ("sft", "dpo"))
    pairs = with_reference(PAIRS, reference, len(PAIRS), seed=3, microbatch_tokens=100)
    backbone.train("dpo")
    rewards = {}
    for dropout in (False, True):
        with backbone.training(dropout=dropout):
            in_order = next(epochs_of(pairs, len(PAIRS), 1, seed=3))
            rewards[dropout] = accumulate(PairPolicy(policy), in_order, objective, 100)["reward_chosen"]
    assert rewards[False] == 0
    assert rewards[True] != 0


def test_implicit_gaps_are_log_ratios_of_chosen_less_rejected(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    world = World(make_backbone, tmp_path)
    assert implicit_gaps(world.policy, world.reference, PAIRS, BETA, 4).tolist() == [0] * len(PAIRS)
    with torch.no_grad():
        for parameter in world.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    expected = [
        sum(
            BETA * sign * (logprob_by_a_loop(world.backbone, "dpo", rows, row) - logprob_by_a_loop(world.backbone, "sft", rows, row))
            for sign, rows in ((1, PAIRS.chosen), (-1, PAIRS.rejected))
        )
        for row in range(len(PAIRS))
    ]  # fmt: skip
    gaps_B = implicit_gaps(world.policy, world.reference, PAIRS, BETA, 4)
    assert gaps_B.tolist() == pytest.approx(expected, abs=1e-5)
    assert float(gaps_B.abs().min()) > 1e-4
