"""Health rules on real runs: a tiny policy goes through train_online with a score or settings that bring a fault about."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from worlds import SAMPLING, World, lengths_B, ppo_params

from pipeline.backbone import Backbone
from pipeline.batch import Rollout, Sequences
from pipeline.data.examples import Prompt, sequences
from pipeline.evaluation import Score
from pipeline.health.findings import Finding
from pipeline.health.rules import find_in_curve
from pipeline.objectives.offline import sft
from pipeline.offline import train_offline
from pipeline.roles import Policy
from pipeline.update import Optimizer, ParameterGroup

ASKED = [Prompt(key, (), [5 + (key * 7) % 200, 40, 41 + key]) for key in range(16)]
END = 2
# nothing holds the policy back
FREE = ppo_params(
    kl_coef=0.0, missing_eos_penalty=0.0, stop_kl=None, rollout_size=16, minibatch_size=16, epochs=2, iterations=1
)
# more of a spread than usual: only a model that can be sure of a token can say the same one again and again
SHARP = {"overrides": {"initializer_range": 0.08}}

Curve = list[dict[str, float | str]]


def world_of(make_backbone: Callable[..., Backbone], score: Score, lr: float, **settings: dict) -> World:
    """Answers of at most 12 tokens to 16 prompts, in one minibatch."""
    sampling = replace(SAMPLING, max_new_tokens=12, stop_ids=(END,))
    return World(make_backbone, FREE, lr, score, sampling, ASKED, microbatch_rows=64, **settings)


def fit(backbone: Backbone, rows: Sequences, schedule: Callable[[int], float], steps: int, lr: float) -> Curve:
    """SFT of the adapter `sft`; its curve."""
    curve: Curve = []
    train_offline(
        Policy(backbone, "sft", 1.0, 64),
        [rows] * steps,
        Optimizer([ParameterGroup("adapter", backbone.train("sft"), lr)], 1.0, schedule),
        lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR),
        10_000,
        dropout=False,
        log=lambda step, stats: curve.append({"step": step, **stats}),
    )
    return curve


def teach(world: World, rare: list[int]) -> None:
    """An SFT model that counts upward in three answers of four, from a number of the prompt's own, and says `rare` in one."""
    rows = [
        (prompt.ids, answer)
        for prompt in ASKED
        for answer in [[*range(20 + 18 * prompt.key, 30 + 18 * prompt.key), END]] * 3 + [rare]
    ]
    fit(world.backbone, sequences(rows), lambda _: 1.0, steps=40, lr=1e-2)
    with torch.no_grad():
        for mine, theirs in zip(*map(world.backbone.adapter_parameters, ("policy", "sft")), strict=True):
            mine.copy_(theirs)
    world.backbone.train("policy")


def run(world: World, iterations: int) -> dict[str, Finding]:
    """What the rules say of a run, by rule."""
    curve: Curve = []
    world.train(iterations, lambda step, stats, _: curve.append({"step": step, **stats}))
    return {finding.rule: finding for finding in find_in_curve("ppo", curve, {})}


def arbitrary(rollout: Rollout) -> Tensor:
    """A score that nobody can learn."""
    return ((rollout.tokens_BT**2).sum(1) % 7).float()


def test_a_score_for_brevity_collapses_length(make_backbone: Callable[..., Backbone]) -> None:
    """Reports huggingface/trl#522 and hiyouga/LLaMA-Factory#803: answers shrink to the bare end token, and that is told."""
    world = world_of(make_backbone, lambda rollout: -lengths_B(rollout) / 5, lr=1e-2, **SHARP)
    teach(world, rare=[END])
    found = run(world, 6)
    assert "a bare end token" in found["length-collapse"].seen
    assert not {"length-blow-up", "repeated-text", "score-flat"} & set(found)


def test_a_score_for_one_word_makes_text_repeat(make_backbone: Callable[..., Backbone]) -> None:
    """The policy says the word until it is cut, to every prompt: repetition first, in the end no entropy is left."""

    def count(rollout: Rollout) -> Tensor:
        return ((rollout.response_ids_BR == 7) & rollout.response_mask_BR).sum(1) / 3

    world = world_of(make_backbone, count, lr=1e-2, **SHARP)
    teach(world, rare=[7] * 10 + [END])
    found = run(world, 8)
    assert {"repeated-text", "entropy-collapse", "length-blow-up"} <= set(found)
    assert found["repeated-text"].step <= found["entropy-collapse"].step


def test_a_huge_learning_rate_makes_kl_leap(make_backbone: Callable[..., Backbone]) -> None:
    found = run(world_of(make_backbone, lengths_B, lr=0.5), 2)
    assert found["kl-spike"].step == 1


def test_a_learning_rate_of_0_leaves_the_policy_still(make_backbone: Callable[..., Backbone]) -> None:
    """As one meant for full fine-tuning does in LoRA. What the same policy answers anew is noise, and no other rule speaks of it."""
    found = run(world_of(make_backbone, arbitrary, lr=0.0), 8)
    assert found["policy-still"].seen.endswith("the policy is 0 nats per answer from the SFT model")
    # a random model does not end its answers
    assert set(found) == {"policy-still", "answers-cut"}


def test_a_score_that_nobody_can_learn_stays_flat(make_backbone: Callable[..., Backbone]) -> None:
    found = run(world_of(make_backbone, arbitrary, lr=1e-2), 10)
    assert "score-flat" in found and "policy-still" not in found


def test_equal_scores_have_no_spread(make_backbone: Callable[..., Backbone]) -> None:
    found = run(world_of(make_backbone, lambda rollout: torch.ones(len(rollout)), lr=1e-2), 3)
    assert found["scores-without-spread"].step == 2
    assert "is 0, around a mean of 1" in found["scores-without-spread"].seen


def test_scores_far_below_0_make_all_advantages_negative(make_backbone: Callable[..., Backbone]) -> None:
    """The value head starts at 0 and needs time; whitened, the same advantages have both signs."""
    found = run(world_of(make_backbone, lambda rollout: -20 - lengths_B(rollout), lr=1e-3), 3)
    assert found["advantages-negative"].step == 2


def test_a_loss_that_is_not_finite_is_said(make_backbone: Callable[..., Backbone]) -> None:
    """Report MakazhanAlpamys/Soup#532: with weights of 1e30 the second of two steps is not taken, and that is shown."""
    world = World(make_backbone, ppo_params(epochs=1), lr=1e30)
    found = run(world, 1)
    assert found["not-finite"].step == 0
    assert "loss" in found["not-finite"].seen


@pytest.mark.parametrize(("later_lr", "rules"), [(1e-2, []), (3.0, ["loss-rises"])])
def test_an_sft_loss_that_rises_is_said(
    make_backbone: Callable[..., Backbone], later_lr: float, rules: list[str]
) -> None:
    """Twenty steps that learn, then ten that go on or that are far too large."""
    rows = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, END]) for n in range(9)])
    curve = fit(make_backbone(**SHARP), rows, lambda step: 1e-2 if step < 20 else later_lr, steps=30, lr=1.0)
    assert [finding.rule for finding in find_in_curve("sft", curve, {})] == rules
