"""The terms of `ppo.reward`: what an answer is paid for. The score is the sum of weight * value over the terms."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipeline.params.section import Section, param

ADDRESS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class _BuiltIn(Section):
    term: str

    @property
    def name(self) -> str:
        """What the term is called in logs."""
        return self.term


class RewardModelTerm(_BuiltIn):
    """The score of the reward model that stage `reward` has trained."""

    term: Literal["reward_model"] = param("which term this is", "reward_model")
    weight: float = param("factor on the score; 0: measured but not paid", 1.0, allow_inf_nan=False)


class LengthPenaltyTerm(_BuiltIn):
    """Minus the tokens beyond a target: see `pipeline.penalties.length_penalty`."""

    term: Literal["length_penalty"] = param("which term this is", "length_penalty")
    weight: float = param("what each token beyond the target costs", 0.05, ge=0, allow_inf_nan=False)
    target: int = param("so many tokens cost nothing, the end token included", 40, ge=0)


class RepetitionPenaltyTerm(_BuiltIn):
    """Minus the share of repeated n-grams, 0 to 1: see `pipeline.penalties.repetition_penalty`."""

    term: Literal["repetition_penalty"] = param("which term this is", "repetition_penalty")
    weight: float = param("what an answer that only repeats itself would cost", 1.0, ge=0, allow_inf_nan=False)
    ngram: int = param("so many tokens in a row, when they come again, are a repetition", 3, ge=1)


class FunctionTerm(Section):
    """A function of your own: see docs/rewards.md."""

    term: Literal["function"] = param("which term this is", "function")
    weight: float = param("factor on what the function returns; 0: measured but not paid", 1.0, allow_inf_nan=False)
    function: str = param(
        "module:function, importable from the project's root; it gets prompts and responses, two lists of str, and "
        "returns a list of float",
        "rewards.arithmetic:correct",
    )

    @field_validator("function")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"is {address!r} but must be module:function; for example rewards.arithmetic:correct.")
        return address

    @property
    def name(self) -> str:
        """What the term is called in logs."""
        return self.function.partition(":")[2]


RewardTerm = Annotated[
    RewardModelTerm | LengthPenaltyTerm | RepetitionPenaltyTerm | FunctionTerm, Field(discriminator="term")
]
