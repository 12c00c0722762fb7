"""A user's own reward, `module:function(prompts, responses) -> list of float`: found, called and checked.

Whatever is wrong with it is said of the function, the row and the value, because its author is the user.
"""

import difflib
import importlib
import inspect
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ParameterError, TrainingError
from pipeline.progress import console

FOLDER = Path("rewards")
"""What DVC watches: a function elsewhere may change without a stage being run again."""
SLOW_SECONDS = 5.0  # for one call; PPO waits so long in every iteration
LARGEST = torch.finfo(torch.float32).max
SHOWN = 60  # characters of a text in an error

Function = Callable[[list[str], list[str]], list[float]]


@dataclass(frozen=True)
class RewardFunction:
    """A function and where it came from.

    address: module:function, its name in errors.
    """

    address: str
    function: Function

    def __call__(self, prompts: list[str], responses: list[str]) -> tuple[list[float], float]:
        """One value per answer, and the seconds that they took.

        Raises:
            TrainingError: the function raises, or returns anything but one finite number per answer.
        """
        started = time.perf_counter()
        try:
            result = self.function(list(prompts), list(responses))
        except Exception as error:  # it is the user's code: it raises what it likes
            raise TrainingError(self._raised(error, prompts, responses)) from error
        seconds = time.perf_counter() - started
        self._check(result, prompts, responses)
        return [float(value) for value in result], seconds

    def _check(self, result: Any, prompts: list[str], responses: list[str]) -> None:
        if not isinstance(result, list | tuple):
            raise TrainingError(
                f"{self.address} returned {_shown(result)} ({type(result).__name__}), but must return a list with one "
                f"number for each of the {len(responses)} answers."
            )
        if len(result) != len(responses):
            raise TrainingError(
                f"{self.address} returned {len(result)} values for {len(responses)} answers, but must return one for each."
            )
        for row, value in enumerate(result):
            if not (isinstance(value, Real) and abs(value) <= LARGEST):  # which no NaN is
                raise TrainingError(
                    f"{self.address} returned {_shown(value)} ({type(value).__name__}) for "
                    f"{_row(row, prompts, responses)}, but must return a finite number."
                )

    def _raised(self, error: Exception, prompts: list[str], responses: list[str]) -> str:
        """What was raised and where; the row is found by giving the function one row at a time."""
        module_name = self.address.partition(":")[0]
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            try:
                self.function([prompt], [response])
            except Exception as of_row:
                return f"{self.address} raised {_told(of_row, module_name)} on {_row(row, prompts, responses)}."
        return (
            f"{self.address} raised {_told(error, module_name)} on {len(responses)} answers together, "
            "but on none of them alone."
        )


def find_function(key: str, address: str) -> RewardFunction:
    """Imports `module:function` from the project's root; `key` names the parameter in errors.

    Raises:
        ParameterError: there is no such module or function, the module cannot be imported, or the function does not
            take two arguments.
    """
    module_name, _, name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # it is there, but imports what is not
            raise ParameterError(
                f"{key} is {address!r} but importing {module_name} raised {_told(error, module_name)}."
            ) from error
        raise ParameterError(
            f"{key} is {address!r} but there is no module {error.name}; modules are looked for from the project's root."
        ) from None
    except Exception as error:
        raise ParameterError(
            f"{key} is {address!r} but importing {module_name} raised {_told(error, module_name)}."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, vars(module), n=1)
        remedy = f"did you mean {near[0]}?" if near else "it is to be defined there with `def`."
        raise ParameterError(f"{key} is {address!r} but {module_name} has no function {name}; {remedy}")
    try:
        inspect.signature(function).bind([], [])
    except TypeError:
        raise ParameterError(
            f"{key} is {address!r} but {name}{inspect.signature(function)} cannot be called with two arguments, "
            "prompts and responses."
        ) from None
    file = Path(inspect.getfile(module)).resolve()
    if FOLDER.resolve() not in file.parents:
        console.print(
            f"{key}: {address} is not in {FOLDER}/, so DVC does not see when it changes; move it there, or run "
            "`dvc repro -f ppo` after a change.",
            markup=False,
            style="yellow",
        )
    return RewardFunction(address, function)


def say_if_slow(address: str, seconds: float, answers: int) -> bool:
    """A line for the user where one call took long; whether it did."""
    if seconds <= SLOW_SECONDS:
        return False
    console.print(
        f"{address} took {seconds:.1f} s for {answers} answers; PPO waits for it in every iteration.",
        markup=False,
        style="yellow",
    )
    return True


def _told(error: Exception, module_name: str) -> str:
    """An exception with the last line of the user's own file that it went through."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    path = module_name.replace(".", "/")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.endswith((f"/{path}.py", f"/{path}/__init__.py"))]
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else said


def _row(row: int, prompts: list[str], responses: list[str]) -> str:
    return f"row {row} (prompt {_shown(prompts[row])}, response {_shown(responses[row])})"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
