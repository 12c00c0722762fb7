"""Scores a second time: the weighted sum of the terms of `ppo.reward`, one answer after the other."""

import importlib
from collections.abc import Callable

from pipeline.data.examples import Prompt
from pipeline.diagnosis import naive_math
from pipeline.diagnosis.naive_model import score_pass
from pipeline.diagnosis.opening import Case
from pipeline.diagnosis.truth import Rows, Truth

Ending = Callable[[list[int], bool], list[int]]
"""(answer, was it cut) -> the answer as the reward model should see it."""


def scores_of(
    case: Case, truth: Truth, rows: Rows, cut_off: list[bool], asked: list[Prompt], ending: Ending
) -> list[float]:
    """One score per answer."""
    totals = [0.0] * len(rows)
    for term in case.cfg.reward:
        if term.term == "reward_model":
            values = [
                score_pass(truth.causal, truth.reward, truth.reward_head, prompt, ending(answer, was_cut))
                for (prompt, answer), was_cut in zip(rows, cut_off, strict=True)
            ]
        elif term.term == "length_penalty":
            values = [naive_math.length_penalty(answer, term.target) for _, answer in rows]
        elif term.term == "repetition_penalty":
            values = [
                naive_math.repetition_penalty(answer if was_cut else answer[:-1], term.ngram)
                for (_, answer), was_cut in zip(rows, cut_off, strict=True)
            ]
        else:
            values = _call(term.function, case, rows, asked)
        totals = [total + term.weight * value for total, value in zip(totals, values, strict=True)]
    return totals


def _call(address: str, case: Case, rows: Rows, asked: list[Prompt]) -> list[float]:
    """A user's own function, given what it is documented to get; what it computes is its own affair."""
    module, _, name = address.partition(":")
    per_prompt = len(rows) // len(asked)
    prompts = [asked[row // per_prompt].messages[-1].content for row in range(len(rows))]
    responses = [case.tokenizer.decode(answer) for _, answer in rows]
    return [float(value) for value in getattr(importlib.import_module(module), name)(prompts, responses)]
