"""What the benchmarks share: the demo's policy on the embedded model, and rows of random tokens."""

import pipeline  # noqa: F401  # isort: skip  (before torch: it says how its threads wait)

from typing import Any

import torch

from pipeline.backbone import BaseIdentity
from pipeline.base_model import locate
from pipeline.batch import Sequences
from pipeline.data.examples import sequences
from pipeline.loading import load_backbone
from pipeline.params.base import BaseParams, LoraParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.roles import Policy

RECIPE = "recipes/demo.yaml"


def embedded_policy(**changes: Any) -> Policy:
    """A fresh, trainable adapter on the embedded model, as the demo recipe has it but for changes in `runtime`."""
    runtime = load_section("runtime", RuntimeParams, RECIPE).model_copy(update=changes)
    torch.set_num_threads(runtime.threads)
    base = load_section("base", BaseParams, RECIPE)
    backbone = load_backbone(locate("embedded"), base, runtime, BaseIdentity("benchmark", 1, "embedded"))
    backbone.add_adapter("sft", load_section("lora", LoraParams, RECIPE))
    backbone.train("sft")
    return Policy(backbone, "sft", 1.0, runtime.logprob_chunk)


def random_rows(rows: int, prompt: int, response: int) -> Sequences:
    """The same rows each time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 40_000, (rows, prompt + response), generator=generator).tolist()
    return sequences([(row[:prompt], row[prompt:]) for row in ids])
