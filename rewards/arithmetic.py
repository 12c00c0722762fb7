"""Rewards that can be verified: is the sum in the question worked out right, and is the answer a number alone?

An example to copy. In params.yaml:

    ppo:
      reward:
        - {term: function, weight: 1.0, function: rewards.arithmetic:correct}
        - {term: function, weight: 0.2, function: rewards.arithmetic:number_alone}
"""

import operator
import re

SUM = re.compile(r"(-?\d+) *([-+*]) *(-?\d+)")
NUMBER = re.compile(r"-?\d+")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def correct(prompts: list[str], responses: list[str]) -> list[float]:
    """1 where the last number of the response is the result of the first sum in the prompt, else 0; 0 without a sum."""
    return [
        float(_result(prompt) in _last_number(response)) for prompt, response in zip(prompts, responses, strict=True)
    ]


def number_alone(prompts: list[str], responses: list[str]) -> list[float]:
    """1 where the response is one whole number and nothing else, else 0."""
    return [float(NUMBER.fullmatch(response.strip()) is not None) for response in responses]


def _result(prompt: str) -> int | None:
    found = SUM.search(prompt)
    return OPERATIONS[found[2]](int(found[1]), int(found[3])) if found else None


def _last_number(response: str) -> list[int]:
    return [int(number) for number in NUMBER.findall(response)[-1:]]
