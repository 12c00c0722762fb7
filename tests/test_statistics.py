"""Win rates, intervals and baselines against values worked out by hand."""

import numpy as np
import pytest
import taking
import torch
from sklearn.linear_model import LogisticRegression

from pipeline.baselines import bag_of_words, length_alone
from pipeline.data.records import Pair
from pipeline.statistics import (
    Rate,
    accuracy_by_length,
    beside_baselines,
    bootstrap,
    calibration,
    distinct_n,
    length_controlled_rate,
    mean_rate,
    wins,
)


def test_a_tie_is_half_a_win() -> None:
    assert wins(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 4.0])).tolist() == [1.0, 0.5, 0.0]


def test_the_interval_of_two_rows_is_all_of_zero_to_one() -> None:
    """Drawn with replacement from (0, 1), both rows are 0 in a quarter of the resamples and both 1 in a quarter."""
    assert mean_rate([0, 1], resamples=2000, seed=3) == Rate(0.5, 0.0, 1.0)


def test_the_interval_narrows_as_the_normal_one_does() -> None:
    """100 rows, 60 of them wins: 0.6 -+ 1.96 * sqrt(0.6 * 0.4 / 100) = 0.6 -+ 0.096."""
    rate = mean_rate([1] * 60 + [0] * 40, resamples=4000, seed=3)
    assert rate.mean == pytest.approx(0.6)
    assert (rate.low, rate.high) == (pytest.approx(0.504, abs=0.015), pytest.approx(0.696, abs=0.015))


def test_a_rate_without_variance_has_no_width() -> None:
    assert mean_rate([1, 1, 1], resamples=100, seed=0) == Rate(1.0, 1.0, 1.0)


def test_the_bootstrap_draws_rows_with_replacement_and_the_same_each_time() -> None:
    seen: list[np.ndarray] = []

    def record(rows_SB: np.ndarray) -> np.ndarray:
        seen.append(rows_SB)
        return rows_SB.sum(1)

    assert bootstrap(record, 5, 100, seed=1) == bootstrap(record, 5, 100, seed=1)
    drawn, whole = seen[:2]
    assert drawn.shape == (100, 5) and set(drawn.flat) == set(range(5))
    assert any(len(set(rows)) < 5 for rows in drawn.tolist())
    assert whole.tolist() == [[0, 1, 2, 3, 4]]


def test_a_win_rate_that_length_explains_is_one_half_at_equal_length() -> None:
    """Longer answers win 80% and shorter ones 20%, but three quarters are longer: raw 0.65, at equal length 0.5."""
    wins_B = np.array([1.0] * 240 + [0.0] * 60 + [1.0] * 20 + [0.0] * 80)
    extra_B = np.array([7.0] * 300 + [-7.0] * 100)
    assert mean_rate(wins_B, 100, 0).mean == pytest.approx(0.65)
    rate = length_controlled_rate(wins_B, extra_B, 100, 0)
    assert rate.mean == pytest.approx(0.5, abs=0.02)
    assert rate.low < 0.5 < rate.high


def test_a_win_rate_that_length_does_not_explain_stays() -> None:
    """70% of wins among the longer and among the shorter answers alike."""
    wins_B = np.array(([1.0] * 7 + [0.0] * 3) * 20)
    extra_B = np.array([5.0] * 100 + [-5.0] * 100)
    assert length_controlled_rate(wins_B, extra_B, 100, 0).mean == pytest.approx(0.7, abs=1e-3)


def test_ties_weigh_half_at_equal_length_too() -> None:
    extra_B = np.array([1.0, -1.0, 2.0, -2.0])
    assert length_controlled_rate(np.full(4, 0.5), extra_B, 100, 0).mean == pytest.approx(0.5)


@pytest.mark.parametrize("wins_B", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_without_length_differences_or_losses_the_raw_rate_stands(wins_B: list[float]) -> None:
    equal = length_controlled_rate(np.array(wins_B), np.zeros(3), 100, 0)
    assert equal == mean_rate(wins_B, 100, 0)
    assert length_controlled_rate(np.ones(3), np.array([1.0, 2.0, -5.0]), 100, 0) == Rate(1.0, 1.0, 1.0)


def test_the_fit_is_that_of_a_library() -> None:
    """scikit-learn's logistic regression with the same prior, ties as half a win and half a loss."""
    generator = np.random.default_rng(5)
    for wins_of in ((0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        wins_B, extra_B = generator.choice(wins_of, 60), generator.integers(-30, 40, 60).astype(float)
        length_B1 = np.tanh(extra_B / extra_B.std())[:, None]
        model = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000)
        model.fit(
            np.vstack([length_B1, length_B1]), [1] * 60 + [0] * 60, sample_weight=np.concatenate([wins_B, 1 - wins_B])
        )
        expected = model.predict_proba([[0.0]])[0, 1]
        assert length_controlled_rate(wins_B, extra_B, 100, 0).mean == pytest.approx(expected, abs=1e-5)


def test_distinct_n_counts_inside_answers_only() -> None:
    """(1,2) (2,1) and (1,2): two of three; no pair spans two answers."""
    answers = [[1, 2, 1], [1, 2]]
    assert distinct_n(answers, 1) == pytest.approx(2 / 5)
    assert distinct_n(answers, 2) == pytest.approx(2 / 3)
    assert distinct_n([[7]], 2) == 0.0


def gap_of(confidence: float) -> float:
    """The gap at which sigmoid(gap) is the confidence."""
    return float(np.log(confidence / (1 - confidence)))


def test_calibration_by_hand() -> None:
    """Bins of 0.05 from 0.5: 0.72 right and 0.74 wrong share one, |0.5 - 0.73| = 0.23; 0.97 right has one, 0.03; a tie is
    sure by 0.5 and half right, 0. Over four pairs: (2 * 0.23 + 0.03 + 0) / 4."""
    gaps_B = torch.tensor([gap_of(0.72), -gap_of(0.74), gap_of(0.97), 0.0], dtype=torch.float64)
    found = calibration(gaps_B)
    assert found["ece"] == pytest.approx(0.1225)
    assert found["confidence"] == pytest.approx((0.72 + 0.74 + 0.97 + 0.5) / 4)


def test_full_confidence_stays_in_the_last_bin() -> None:
    assert calibration(torch.tensor([1e4, 1e4, -1e4, 1e4])) == {"ece": 0.25, "confidence": 1.0}


def test_accuracy_by_length_by_hand() -> None:
    """20 against 22 tokens is similar (2 of 22 is under a tenth), 10 against 12 is not; the shorter one was right."""
    chosen_B, rejected_B = torch.tensor([20, 10, 30, 30]), torch.tensor([22, 12, 10, 20])
    gaps_B = torch.tensor([-1.0, 1.0, 0.0, -2.0])
    found = accuracy_by_length(gaps_B, chosen_B - rejected_B, torch.maximum(chosen_B, rejected_B))
    assert found == {
        "chosen_shorter": {"pairs": 1, "accuracy": 1.0},
        "similar": {"pairs": 1, "accuracy": 0.0},
        "chosen_longer": {"pairs": 2, "accuracy": 0.25},
    }


def test_a_group_without_pairs_has_no_accuracy() -> None:
    found = accuracy_by_length(torch.tensor([1.0]), torch.tensor([5]), torch.tensor([10]))
    assert found["chosen_shorter"] == found["similar"] == {"pairs": 0}


def test_a_model_beside_its_rivals() -> None:
    rival = np.array([1.0, 1.0, 0.0, 0.0])
    found = beside_baselines(torch.tensor([1.0, -1.0, 2.0, 0.0]), {"coin": rival}, 100, 0)
    assert found["pairs"] == 4
    assert found["accuracy"]["mean"] == pytest.approx(0.625)
    assert found["accuracy_coin"]["mean"] == pytest.approx(0.5)
    assert found["lead_over_coin"]["mean"] == pytest.approx(0.125)


def pair(chosen: str, rejected: str) -> Pair:
    return taking.pair("q", chosen, rejected)


def test_length_alone_goes_the_way_that_training_pairs_go() -> None:
    test = [pair("aaaa", "a"), pair("a", "aaaa"), pair("aa", "bb")]
    assert length_alone([pair("long one", "x")], test).tolist() == [1.0, 0.0, 0.5]
    assert length_alone([pair("x", "long one")], test).tolist() == [0.0, 1.0, 0.5]


def test_a_bag_of_words_learns_the_word_and_nothing_else() -> None:
    train = [pair("good day", "bad day"), pair("good night", "bad night")]
    assert bag_of_words(train, [pair("so good", "so bad"), pair("bad", "good"), pair("new", "words")]).tolist() == [
        1.0,
        0.0,
        0.5,
    ]
    assert bag_of_words([pair("one", "two")], [pair("x", "y")]).tolist() == [0.5]
