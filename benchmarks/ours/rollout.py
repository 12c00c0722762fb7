"""Our rollout on the embedded model, for planned response lengths."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ours.roles import PACKAGES, asked, make_roles, open_backbone, sampling_of
from benchmarks.probe import Figures, serve
from benchmarks.setting import our_setting
from benchmarks.work import Work
from pipeline import rollout
from pipeline.rollout import generate

STOP_ID = 0  # the first of the vocabulary: the number 0 is passed by its probability alone

Noise = Callable[[int, int, list[tuple[int, int]], int], Tensor]


def planned(noise: Noise, lengths: list[int]) -> Noise:
    """Noise that makes row b sample STOP_ID as its token number `lengths[b]`, and no row before that.

    A token is the first whose running sum of probabilities passes the row's number. Numbers in [0.5, 1) pass by the first token of the
    vocabulary as long as that has less than half of the probability.
    """

    def uniforms(seed: int, step: int, keys: list[tuple[int, int]], token: int) -> Tensor:
        ends_B = torch.tensor([lengths[row] == token + 1 for row, _ in keys])
        return torch.where(ends_B, 0.0, 0.5 + noise(seed, step, keys, token) / 2)

    return uniforms


@contextmanager
def lengths_planned(lengths: list[int]) -> Iterator[None]:
    """Rollouts inside have these lengths. It is the model that ends answers, so there is no other way than its noise."""
    noise = rollout.uniforms
    rollout.uniforms = planned(noise, lengths)
    try:
        yield
    finally:
        rollout.uniforms = noise


def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured rollout, for each named list of response lengths."""
    work = Work(**request["work"])
    setting = our_setting(work, request.get("changes"))
    policy = make_roles(open_backbone(Path(request["model"]), setting), setting).policy
    seconds: dict[str, list[float]] = {}
    for name, lengths in request["lengths"].items():
        sampling = sampling_of(setting, max(lengths), (STOP_ID,))
        seconds[name] = []
        for step, prompts in enumerate(asked(work)):
            with lengths_planned(lengths):
                started = time.perf_counter()
                made = generate(policy, prompts, sampling, step)
                seconds[name].append(time.perf_counter() - started)
            assert made.response_lengths_B.tolist() == lengths, "an answer has another length than planned"
        del seconds[name][: work.warmup]
    return {"seconds": seconds}


if __name__ == "__main__":
    serve(run, PACKAGES)
