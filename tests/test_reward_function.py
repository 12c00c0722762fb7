"""A user's own reward function: found where it is, and whatever is wrong with it named with function, row and value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import reward_function
from pipeline.errors import ParameterError, TrainingError
from pipeline.reward_function import RewardFunction, find_function, say_if_slow
from rewards.arithmetic import correct, number_alone

PROMPTS, RESPONSES = ["first question", "second question"], ["yes", "no"]
SOURCE = """
def good(prompts, responses):
    return [float(len(response)) for response in responses]

def short(responses):
    return []

def fails(prompts, responses):
    return [1 / (response != "no") for response in responses]

def alone(prompts, responses):
    if len(prompts) > 1:
        raise RuntimeError("too many")
    return [0.0]

NUMBER = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's root with a module of reward functions, one that does not import, and one that lacks a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "needy_rewards.py").write_text("import a_package_that_is_not_there\n")
    return tmp_path


def test_a_function_is_found_and_called(project: Path, capsys: pytest.CaptureFixture) -> None:
    values, seconds = find_function("ppo.reward[0].function", "own_rewards:good")(PROMPTS, RESPONSES)
    assert values == [3.0, 2.0] and 0 <= seconds < 1
    assert "own_rewards:good is not in rewards/, so DVC does not see when it changes" in capsys.readouterr().out


def test_where_dvc_looks_nothing_is_said(capsys: pytest.CaptureFixture) -> None:
    assert find_function("key", "rewards.arithmetic:correct").function is correct
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere:f", "there is no module nowhere; modules are looked for from the project's root."),
        ("own_rewards.sub:f", "there is no module own_rewards.sub;"),
        ("own_rewards:goood", "own_rewards has no function goood; did you mean good?"),
        ("own_rewards:NUMBER", "own_rewards has no function NUMBER;"),
        ("own_rewards:short", "short(responses) cannot be called with two arguments, prompts and responses."),
        ("broken_rewards:f", "importing broken_rewards raised ZeroDivisionError: division by zero (broken_rewards.py, line 2)."),
        ("needy_rewards:f", "importing needy_rewards raised ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_said_with_the_key(project: Path, address: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        find_function("ppo.reward[1].function", address)
    assert str(error.value).startswith(f"ppo.reward[1].function is '{address}' but ")
    assert message in str(error.value)


def returning(result: Any) -> RewardFunction:
    return RewardFunction("mine:f", lambda prompts, responses: result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "mine:f returned None (NoneType), but must return a list with one number for each of the 2 answers."),
        (0.5, "mine:f returned 0.5 (float), but must return a list"),
        (torch.ones(2), "mine:f returned tensor([1., 1.]) (Tensor), but must return a list"),
        ([1.0], "mine:f returned 1 values for 2 answers, but must return one for each."),
        ([1.0, None], "mine:f returned None (NoneType) for row 1 (prompt 'second question', response 'no'), but must return a finite number."),
        ([float("nan"), 1.0], "mine:f returned nan (float) for row 0 (prompt 'first question', response 'yes'), but"),
        ([1.0, float("inf")], "mine:f returned inf (float) for row 1"),
        ([1.0, 10**400], "(int) for row 1"),
        (["1", 1.0], "mine:f returned '1' (str) for row 0"),
    ],
    ids=["None", "number", "tensor", "too few", "None in it", "NaN", "infinity", "too large", "text"],
)  # fmt: skip
def test_what_is_returned_is_checked(result: Any, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        returning(result)(PROMPTS, RESPONSES)
    assert message in str(error.value)


def test_truth_values_and_numbers_of_numpy_are_numbers() -> None:
    values, _ = returning((True, np.float32(0.25)))(PROMPTS, RESPONSES)
    assert values == [1.0, 0.25]


def test_what_is_raised_is_said_with_row_and_line(project: Path) -> None:
    with pytest.raises(TrainingError) as error:
        find_function("key", "own_rewards:fails")(PROMPTS, RESPONSES)
    assert str(error.value) == (
        "own_rewards:fails raised ZeroDivisionError: division by zero (own_rewards.py, line 9) "
        "on row 1 (prompt 'second question', response 'no')."
    )
    with pytest.raises(
        TrainingError, match=r"raised RuntimeError: too many .*on 2 answers together, but on none of them"
    ):
        find_function("key", "own_rewards:alone")(PROMPTS, RESPONSES)


def test_long_texts_are_cut_in_errors() -> None:
    with pytest.raises(TrainingError) as error:
        returning([None])(["p" * 500], ["r"])
    assert len(str(error.value)) < 250 and "ppp…" in str(error.value)


def test_a_function_cannot_change_what_others_get() -> None:
    prompts, responses = list(PROMPTS), list(RESPONSES)
    RewardFunction("mine:f", lambda p, r: (p.clear(), r.clear(), [1, 2])[2])(prompts, responses)
    assert (prompts, responses) == (PROMPTS, RESPONSES)


def test_a_slow_function_is_said(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_function, "SLOW_SECONDS", 2.0)
    assert not say_if_slow("mine:f", 2.0, 64)
    assert capsys.readouterr().out == ""
    assert say_if_slow("mine:f", 2.5, 64)
    assert capsys.readouterr().out == "mine:f took 2.5 s for 64 answers; PPO waits for it in every iteration.\n"


@pytest.mark.parametrize(
    ("function", "prompt", "response", "value"),
    [
        (correct, "What is 12 + 30?", "42", 1.0),
        (correct, "What is 12 + 30?", "12 and 30 make 42.", 1.0),
        (correct, "What is 12 + 30?", "42, or 43", 0.0),
        (correct, "What is 12 + 30?", "I do not know.", 0.0),
        (correct, "What is 3-5?", "-2", 1.0),
        (correct, "7 * 6", "42", 1.0),
        (correct, "What is tea?", "0", 0.0),
        (number_alone, "What is 12 + 30?", " 41\n", 1.0),
        (number_alone, "What is 12 + 30?", "It is 42", 0.0),
    ],
)
def test_the_example_verifies_sums(function: Callable, prompt: str, response: str, value: float) -> None:
    assert function([prompt], [response]) == [value]
