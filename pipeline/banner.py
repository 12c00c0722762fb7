"""A stage's first and last lines: what it is about to do with what, where its figures go, and what it took."""

import os

import torch

from pipeline.masking import masked
from pipeline.params.base import TokensParams
from pipeline.params.runtime import RuntimeParams
from pipeline.progress import announce, duration


def tell_start(name: str, seed: int, runtime: RuntimeParams, state: str) -> None:
    """Before anything is loaded. `state`: the folder of what a killed stage goes on from."""
    where = masked(os.environ.get("MLFLOW_TRACKING_URI") or runtime.tracking_uri)
    announce(
        "start",
        f"{name}: seed {seed}; figures go to MLflow at {where}, experiment {runtime.experiment}; training state to {state}",
        stage=name,
        seed=seed,
        tracking=where,
        experiment=runtime.experiment,
        state=state,
    )


def tell_work(name: str, sizes: dict[str, int], adapters: list[str], work: str, tokens: TokensParams) -> None:
    """Before the first step.

    sizes: trained weights by what they belong to: training none can look like training.
    adapters: all that are on the base.
    work: rows, steps and the like, in words.
    """
    counts = ", ".join(f"{count:,} ({part})" for part, count in sizes.items())
    limits = f"prompts of up to {tokens.max_prompt} tokens, answers of up to {tokens.max_response}"
    announce("adapters", f"{name}: adapters on the base: {', '.join(adapters)}", stage=name, adapters=adapters)
    announce("trained", f"{name}: weights that are trained: {counts}", stage=name, weights=sizes)
    announce(
        "work",
        f"{name}: {work}; {limits}",
        stage=name,
        work=work,
        max_prompt=tokens.max_prompt,
        max_response=tokens.max_response,
    )


def tell_end(name: str, cost: dict[str, float]) -> None:
    """After the last output is written; `cost` as MLflow gets it."""
    took, peak = duration(cost["cost.seconds"]), cost["cost.peak_memory_gb"]
    gpu = f", {cost['cost.peak_gpu_memory_gb']:.1f} GB on the GPU" if "cost.peak_gpu_memory_gb" in cost else ""
    text = f"{name}: done in {took}, peak memory {peak:.1f} GB{gpu}; metrics/{name}.json has the result"
    announce("end", text, stage=name, **{key.removeprefix("cost."): value for key, value in cost.items()})


def gpu_memory() -> dict[str, float]:
    """The most that this process's tensors held on the GPU at once, in GiB; empty where there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    return {"cost.peak_gpu_memory_gb": torch.cuda.max_memory_allocated() / 1024**3}
