"""What an answer is paid for: the weighted sum of the terms of `ppo.reward`.

Axes: B answers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline import ranks
from pipeline.batch import Rollout
from pipeline.classifier import Scorer
from pipeline.data.examples import Prompt
from pipeline.data.tokenization import ChatTokenizer
from pipeline.params.reward_terms import (
    FunctionTerm,
    LengthPenaltyTerm,
    RepetitionPenaltyTerm,
    RewardModelTerm,
    RewardTerm,
)
from pipeline.penalties import length_penalty, repetition_penalty
from pipeline.reward_function import RewardFunction, find_function, say_if_slow
from pipeline.samples import answers


def find_functions(terms: Iterable[RewardTerm]) -> dict[str, RewardFunction]:
    """The users' functions by the names of their terms.

    Raises:
        ParameterError: one cannot be found, imported or called with two arguments.
    """
    return {
        term.name: find_function(f"ppo.reward[{place}].function", term.function)
        for place, term in enumerate(terms)
        if isinstance(term, FunctionTerm)
    }


class Rewards:
    """Answers -> one number each: the weighted sum of the terms; [B], float32 on the CPU.

    terms: what is summed up.
    functions: of `find_functions`.
    questions: their last turns are the prompts that functions get, as they stand in the data.
    tokenizer: gives functions the answers as text, without the end token.
    model: the reward model; never touched where no term asks for it.
    values, seconds: of the answers scored last: each term's values before weighting, and what each function took.
    """

    def __init__(
        self,
        terms: Iterable[RewardTerm],
        functions: dict[str, RewardFunction],
        questions: Iterable[Prompt],
        tokenizer: ChatTokenizer,
        model: Scorer | None,
        microbatch_tokens: int,
    ):
        self.terms = list(terms)
        self.functions = functions
        self.questions = {question.key: question.messages[-1].content for question in questions} if functions else {}
        self.tokenizer = tokenizer
        self.model = model
        self.microbatch_tokens = microbatch_tokens
        self.values: dict[str, Tensor] = {}
        self.seconds: dict[str, float] = {}
        self._slow: set[str] = set()

    def __call__(self, rollout: Rollout) -> Tensor:
        """The weighted sum.

        Raises:
            TrainingError: a function raises, or returns anything but one finite number per answer.
        """
        return self._sum(
            rollout, lambda model: model.score_all(rollout.ended(self.tokenizer.end_id), self.microbatch_tokens)
        )

    def by_minibatch(self, minibatch_size: int) -> Callable[[Rollout], Tensor]:
        """The same in PPO: the reward model sees the micro-batches that the update will see."""
        end_id = self.tokenizer.end_id
        return lambda rollout: self._sum(
            rollout, lambda model: model.score_minibatches(rollout, end_id, self.microbatch_tokens, minibatch_size)
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: what is still to be logged of the answers scored last."""
        return {"values": self.values, "seconds": dict(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.values, self.seconds = state["values"], state["seconds"]

    def means(self) -> dict[str, float]:
        """Each term's mean over the answers scored last, before weighting, under the name it has in logs."""
        return means(self.values)

    def _sum(self, rollout: Rollout, model_score: Callable[[Scorer], Tensor]) -> Tensor:
        self.values = {term.name: self._value(term, rollout, model_score) for term in self.terms}
        return torch.stack([term.weight * self.values[term.name] for term in self.terms]).sum(0)

    def _value(self, term: RewardTerm, rollout: Rollout, model_score: Callable[[Scorer], Tensor]) -> Tensor:
        match term:
            case RewardModelTerm():
                return model_score(self.model)
            case LengthPenaltyTerm():
                return length_penalty(rollout.response_lengths_B, term.target)
            case RepetitionPenaltyTerm():
                return repetition_penalty(_without_end(rollout), term.ngram)
            case FunctionTerm():
                return self._call(term.name, rollout)

    def _call(self, name: str, rollout: Rollout) -> Tensor:
        function = self.functions[name]
        prompts = [self.questions[key] for key in rollout.prompt_ids_B.tolist()]
        # once: it may draw at random, or be paid for by the call
        values, seconds = ranks.of_main(lambda: function(prompts, answers(rollout, self.tokenizer)))
        self.seconds[f"reward_seconds/{name}"] = seconds
        if name not in self._slow and say_if_slow(function.address, seconds, len(values)):
            self._slow.add(name)
        return torch.tensor(values, dtype=torch.float32)


def means(values: dict[str, Tensor]) -> dict[str, float]:
    """Term -> mean value, named as in logs."""
    return {f"reward_terms/{name}": float(values_B.mean()) for name, values_B in values.items()}


def _without_end(rollout: Rollout) -> list[list[int]]:
    lengths = (rollout.response_lengths_B - (~rollout.truncated_B).long()).tolist()
    return [ids[:length].tolist() for ids, length in zip(rollout.response_ids_BR, lengths, strict=True)]
