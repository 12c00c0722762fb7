"""Plain transformers `generate` with the LoRA adapter on, as everyone starts: all rows until the last one has ended."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.peer.common import PACKAGES, adapted_model, prepare, tokenizer_of
from benchmarks.probe import Figures, serve
from benchmarks.work import Work, prompt_ids


class PlannedLengths(StoppingCriteria):
    """Row b ends after `lengths[b]` new tokens, whatever they are; the others go on."""

    def __init__(self, lengths: list[int], prompt: int):
        self.ends_B = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Which rows have ended."""
        return input_ids.shape[1] >= self.ends_B


@torch.no_grad()
def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured rollout, for each named list of response lengths."""
    work, folder = Work(**request["work"]), Path(request["model"])
    prepare(work)
    pad = tokenizer_of(folder).pad_token_id
    model = adapted_model(folder, work).eval()
    # no token ends an answer: the lengths are planned
    model.generation_config.eos_token_id = None
    seconds: dict[str, list[float]] = {}
    for name, lengths in request["lengths"].items():
        longest = max(lengths)
        config = GenerationConfig(
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad,
            eos_token_id=None,
        )
        seconds[name] = []
        for iteration in range(work.warmup + work.iterations):
            ids_BP = torch.tensor(prompt_ids(work, iteration))
            started = time.perf_counter()
            made = model.generate(
                input_ids=ids_BP,
                attention_mask=torch.ones_like(ids_BP),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([PlannedLengths(lengths, work.prompt)]),
            )
            seconds[name].append(time.perf_counter() - started)
            assert made.shape[1] == work.prompt + longest, made.shape
        del seconds[name][: work.warmup]
    return {"seconds": seconds}


if __name__ == "__main__":
    serve(run, PACKAGES)
