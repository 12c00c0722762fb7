"""Sampled answers as tables for people."""

from typing import Any

from torch import Tensor

from pipeline.batch import Experience, Sequences
from pipeline.data.tokenization import ChatTokenizer


def answers(batch: Sequences, tokenizer: ChatTokenizer) -> list[str]:
    """The responses as text."""
    return [
        tokenizer.decode(ids[:length].tolist())
        for ids, length in zip(batch.response_ids_BR, batch.response_lengths_B.tolist(), strict=True)
    ]


def sample_rows(experience: Experience, tokenizer: ChatTokenizer, terms: dict[str, Tensor]) -> list[dict[str, Any]]:
    """One row per answer: prompt, answer, score and the terms that it is made of, KL to the reference, length."""
    kl_B = ((experience.old_logprobs_BR - experience.ref_logprobs_BR) * experience.response_mask_BR).sum(1)
    rows = []
    for row, answer in enumerate(answers(experience, tokenizer)):
        prompt = experience.tokens_BT[row, : experience.prompt_lengths_B[row]].tolist()
        rows.append(
            {
                "prompt": tokenizer.decode(prompt),
                "answer": answer,
                "score": float(experience.scores_B[row]),
                **{name: float(values_B[row]) for name, values_B in terms.items()},
                "kl": float(kl_B[row]),
                "tokens": int(experience.response_lengths_B[row]),
            }
        )
    return rows
