"""Reward terms, their weighted sum, and scores relative to running moments, against values worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from taking import system, user
from test_invariants import World, ppo_params
from torch import Tensor

from pipeline.algorithms import algorithm_of
from pipeline.backbone import Backbone
from pipeline.batch import Rollout
from pipeline.data.examples import Prompt, sequences
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import ParameterError
from pipeline.evaluation import evaluate, shaped_scores
from pipeline.heads import ScalarHead
from pipeline.moments import Moments, ScoreNormalizer
from pipeline.online import train_online
from pipeline.params.ppo import PPOParams
from pipeline.params.section import parse_section, read_params
from pipeline.penalties import length_penalty, repetition_penalty
from pipeline.reward_function import RewardFunction
from pipeline.rewards import Rewards
from pipeline.roles import RewardModel
from pipeline.rollout import Sampling, generate

DEMO = read_params(ROOT / "recipes" / "demo.yaml")["ppo"]
MODEL = {"term": "reward_model", "weight": 1.0}
LENGTH = {"term": "length_penalty", "weight": 0.5, "target": 2}
REPETITION = {"term": "repetition_penalty", "weight": 2.0, "ngram": 1}
SAMPLING = Sampling(max_new_tokens=6, stop_ids=tuple(range(2, 320, 8)), chunk=64, seed=3)
FUNCTION = {"term": "function", "weight": 3.0, "function": "mine:vowels"}


def section(*terms: Any) -> PPOParams:
    return parse_section("ppo", PPOParams, DEMO | {"reward": list(terms)})


# --- terms ---


def test_length_penalty_by_hand() -> None:
    assert length_penalty(torch.tensor([10, 12, 15]), target=12).tolist() == [0.0, 0.0, -3.0]


@pytest.mark.parametrize(
    ("ids", "n", "penalty"),
    [
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21: two of four were there before
        ([7, 7, 7, 7], 1, -0.75),
        ([1, 2, 3], 2, 0.0),
        ([1, 2], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition_penalty_by_hand(ids: list[int], n: int, penalty: float) -> None:
    assert repetition_penalty([ids], n).tolist() == [penalty]


# --- their sum ---


class ModelThatCounts:
    """A reward model whose score is the number of the answer's tokens."""

    def score_all(self, batch: Any, microbatch_tokens: int) -> Tensor:
        return batch.response_lengths_B.float()


@pytest.fixture
def scored(tokenizer: ChatTokenizer) -> tuple[Rollout, list[Prompt]]:
    """Answers 'aab' with an end token, and 'ba' cut; the conversations they answer."""
    asked = [
        Prompt(21, (system("Be brief."), user("A?"), user("B?")), tokenizer.prompt_ids((user("B?"),))),
        Prompt(22, (user("C?"),), tokenizer.prompt_ids((user("C?"),))),
    ]
    said = [[*tokenizer.tokenizer.encode("aab"), tokenizer.end_id], tokenizer.tokenizer.encode("ba")]
    rows = sequences([(prompt.ids, ids) for prompt, ids in zip(asked, said, strict=True)])
    return Rollout(
        rows.tokens_BT,
        rows.prompt_lengths_B,
        rows.response_lengths_B,
        behaviour_logprobs_BR=torch.zeros(2, 4),
        truncated_B=torch.tensor([False, True]),
        prompt_ids_B=torch.tensor([21, 22]),
    ), asked


def rewards_of(
    cfg: PPOParams, asked: list[Prompt], tokenizer: ChatTokenizer, function: Callable | None = None, model: Any = None
) -> Rewards:
    functions = {"vowels": RewardFunction("mine:vowels", function)} if function else {}
    return Rewards(cfg.reward, functions, asked, tokenizer, model, 4)


def test_the_score_is_the_weighted_sum(scored: tuple[Rollout, list[Prompt]], tokenizer: ChatTokenizer) -> None:
    """Model: 4 tokens, and 2 with an end token put after: 3. Length: 2 and 0 beyond. Repeated: 1 of 3, 0 of 2; the end
    token is no repetition. Vowels: 2 and 1. Sums: 4 - 1 - 2/3 + 6 and 3 - 0 - 0 + 3."""
    rollout, asked = scored
    seen: list[tuple[list[str], list[str]]] = []

    def vowels(prompts: list[str], responses: list[str]) -> list[float]:
        seen.append((prompts, responses))
        return [response.count("a") for response in responses]

    rewards = rewards_of(section(MODEL, LENGTH, REPETITION, FUNCTION), asked, tokenizer, vowels, ModelThatCounts())
    torch.testing.assert_close(rewards(rollout), torch.tensor([4 - 1 - 2 / 3 + 6, 6.0]))
    assert seen == [(["B?", "C?"], ["aab", "ba"])]
    assert rewards.means() == pytest.approx(
        {
            "reward_terms/reward_model": 3.5,
            "reward_terms/length_penalty": -1.0,
            "reward_terms/repetition_penalty": -1 / 6,
            "reward_terms/vowels": 1.5,
        }
    )
    assert list(rewards.seconds) == ["reward_seconds/vowels"]


def test_a_weight_of_0_measures_without_paying(scored: tuple[Rollout, list[Prompt]], tokenizer: ChatTokenizer) -> None:
    rollout, asked = scored
    rewards = rewards_of(section(LENGTH | {"weight": 0.0}), asked, tokenizer)
    assert rewards(rollout).tolist() == [0.0, 0.0]
    assert rewards.means() == {"reward_terms/length_penalty": -1.0}


def test_without_a_reward_model_none_is_touched(scored: tuple[Rollout, list[Prompt]], tokenizer: ChatTokenizer) -> None:
    rollout, asked = scored
    cfg = section(LENGTH)
    assert not cfg.uses_reward_model and section(LENGTH, MODEL).uses_reward_model
    assert rewards_of(cfg, asked, tokenizer, model=None).by_minibatch(2)(rollout).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_default_the_score_is_the_reward_models_to_the_bit(
    make_backbone: Callable[..., Backbone], tokenizer: ChatTokenizer, dtype: str
) -> None:
    """As PPO scored before there were other terms: by minibatches, the end token put after cut answers of each micro-batch."""
    world = World(make_backbone, ppo_params(), dtype=dtype)
    model = RewardModel(world.backbone, "reward", ScalarHead(world.backbone.hidden_size, std=0.1))
    asked = [Prompt(key, (user("q"),), [5 + key] * (3 + 2 * key)) for key in range(8)]
    rollout = generate(world.policy, asked, SAMPLING, step=0)
    assert 0 < int(rollout.truncated_B.sum()) < 8
    expected = []
    with world.backbone.inference(), torch.no_grad():
        for part in rollout.split(4):
            order = torch.argsort(part.lengths_B, stable=True)
            scores = torch.zeros(4)
            scores[order] = model.score(part.select(order).ended(tokenizer.end_id))
            expected.append(scores)
    rewards = Rewards(section(MODEL).reward, {}, asked, tokenizer, model, 1000)
    assert torch.equal(rewards.by_minibatch(4)(rollout), torch.cat(expected))
    assert torch.equal(rewards(rollout), model.score_all(rollout.ended(tokenizer.end_id), 1000))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([], "ppo.reward is [] but must have a term; for example [{'term': 'reward_model', 'weight': 1.0}]."),
        ([MODEL, MODEL], "ppo.reward has 2 terms called reward_model but each must have a name of its own: leave one out, or give the functions different names."),
        ([MODEL, {"term": "lenght_penalty"}], "ppo.reward[1].term is 'lenght_penalty' but there is no such kind; did you mean length_penalty?"),
        ([{"weight": 1.0}], "ppo.reward[0].term is missing; known here: reward_model, length_penalty, repetition_penalty, function."),
        ([{"term": "length_penalty", "weight": 1.0, "taget": 3, "target": 3}], "ppo.reward[0].taget is not a parameter; did you mean ppo.reward[0].target?"),
        ([LENGTH | {"weight": -1.0}], "ppo.reward[0].weight is -1.0 but must be greater than or equal to 0; for example 0.05."),
        ([MODEL, {"term": "length_penalty", "weight": 1.0}], "ppo.reward[1].target is missing; for example 40."),
        ([FUNCTION | {"function": "mine.vowels"}], "ppo.reward[0].function is 'mine.vowels' but must be module:function; for example rewards.arithmetic:correct."),
        ([MODEL | {"weight": float("inf")}], "ppo.reward[0].weight is inf but must be a finite number; for example 1.0."),
        (["reward_model"], "ppo.reward[0] is 'reward_model' but must be a mapping; for example [{'term': 'reward_model', 'weight': 1.0}]."),
    ],
    ids=["none", "twice", "misspelt", "no term", "unknown key", "bonus for length", "missing", "no address", "infinite", "word"],
)  # fmt: skip
def test_bad_terms_are_named_with_their_place(terms: list, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        section(*terms)
    assert str(error.value) == message


# --- running moments ---


def test_moments_by_hand() -> None:
    """1 2 3 have mean 2 and variance 2/3; with 10 after them mean 4 and variance (9 + 4 + 1 + 36) / 4."""
    first = Moments().merged(Moments.of(torch.tensor([1.0, 2.0, 3.0])))
    assert (first.count, first.mean, first.variance) == (3, 2.0, pytest.approx(2 / 3))
    both = first.merged(Moments.of(torch.tensor([10.0])))
    assert (both.count, both.mean, both.variance) == (4, 4.0, 12.5)


def test_moments_of_batches_are_those_of_all_at_once_in_float64() -> None:
    """A million added to each: in float32 the variance of 1 would be lost."""
    scores = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1e6
    moments = Moments()
    for part in scores.split([1, 7, 92, 900]):
        moments = moments.merged(Moments.of(part))
    mean = sum(scores.tolist()) / 1000
    assert moments.mean == pytest.approx(mean, rel=1e-12)
    assert moments.variance == pytest.approx(sum((score - mean) ** 2 for score in scores.tolist()) / 1000, rel=1e-6)


def test_scores_are_taken_in_before_they_are_used() -> None:
    """(0, 2) about mean 1, deviation 1; then 4 about mean 2, variance 8/3."""
    normalize = ScoreNormalizer()
    torch.testing.assert_close(normalize(torch.tensor([0.0, 2.0])), torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(normalize(torch.tensor([4.0])), torch.tensor([2 / (8 / 3) ** 0.5]))


def test_one_score_or_equal_scores_become_0() -> None:
    """Report huggingface/trl#4662 in another place: no spread is no NaN."""
    assert ScoreNormalizer()(torch.tensor([3.5])).tolist() == [0.0]
    assert ScoreNormalizer()(torch.tensor([3.5, 3.5])).tolist() == [0.0, 0.0]


def test_a_normalizer_goes_on_where_it_was_saved() -> None:
    straight, first, resumed = ScoreNormalizer(), ScoreNormalizer(), ScoreNormalizer()
    batches = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).unbind()
    expected = [straight(batch) for batch in batches][-1]
    for batch in batches[:2]:
        first(batch)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(resumed(batches[2]), expected)


def test_scores_are_normalised_then_clipped_then_charged_for_the_cut() -> None:
    """Mean 5, deviation 5: 0 and 10 are -1 and 1, clipped to 0.5, less 2 where cut."""
    shaped = shaped_scores(ScoreNormalizer()(torch.tensor([0.0, 10.0])), torch.tensor([False, True]), 0.5, 2.0)
    torch.testing.assert_close(shaped, torch.tensor([-0.5, -1.5]))


def test_a_score_scale_that_drifts_leaves_the_critic_alone(make_backbone: Callable[..., Backbone]) -> None:
    """Report microsoft/DeepSpeedExamples#556: scores drift from about 4 to about 20; the value loss, from a head at 0, is
    then near half the square of the score. Relative to the scores so far it is near that of a unit normal, and the raw
    scores are what is kept."""

    def value_losses(normalize: bool) -> list[float]:
        cfg = ppo_params(normalize_scores=normalize, score_clip=100.0, missing_eos_penalty=0.0, lam=1.0, stop_kl=None)
        world = World(make_backbone, cfg, lr=0.0)
        normalizer = ScoreNormalizer() if normalize else lambda scores_B: scores_B
        losses = []
        for step, level in enumerate((4.0, 12.0, 20.0)):
            rollout = generate(
                world.policy, [Prompt(key, (), [5 + key, 6, 7]) for key in range(8)], replace(SAMPLING, seed=step), step
            )
            experience = evaluate(
                rollout, world.policy, world.reference, lambda rows, level=level: level + (rows.prompt_ids_B % 2), algorithm_of(cfg), cfg, 8, normalizer
            )  # fmt: skip
            assert float(experience.scores_B.mean()) == level + 0.5
            losses.append(world.update(experience, 8)["value_loss"])
        return losses

    raw, relative = value_losses(False), value_losses(True)
    assert raw[2] > 150  # 20.5^2 / 2 is 210
    assert max(relative) < 2


# --- end to end ---


def test_a_verifiable_reward_is_learnt_without_a_reward_model(
    make_backbone: Callable[..., Backbone], tokenizer: ChatTokenizer
) -> None:
    """The format check of a user's function, through text and back: does the answer have a digit?"""

    def has_digit(prompts: list[str], responses: list[str]) -> list[float]:
        assert set(prompts) == {f"What is {key} + 1?" for key in range(32)}
        return [float(any(letter in "0123456789" for letter in response)) for response in responses]

    questions = [(user(f"What is {key} + 1?"),) for key in range(32)]
    asked = [Prompt(key, question, tokenizer.prompt_ids(question)[-8:]) for key, question in enumerate(questions)]
    cfg = ppo_params(
        reward=[FUNCTION | {"weight": 2.0}], kl_coef=0.0, missing_eos_penalty=0.0, stop_kl=None, minibatch_size=16, rollout_size=32
    )  # fmt: skip
    world = World(make_backbone, cfg, lr=1e-2)
    rewards = rewards_of(cfg, asked, tokenizer, has_digit)
    shares: list[float] = []
    train_online(
        world.policy,
        world.reference,
        rewards.by_minibatch(cfg.minibatch_size),
        [asked] * 24,
        world.optimizer,
        algorithm_of(cfg),
        cfg,
        SAMPLING,
        32,
        lambda *_: shares.append(rewards.means()["reward_terms/vowels"]),
        lambda _: None,
    )
    assert shares[0] < 0.5
    assert sum(shares[-3:]) / 3 > 0.9
