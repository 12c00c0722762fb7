"""Every beat of the loop computed a second time, in the order of the loop; the first that deviates is where to look."""

import hashlib

import torch
from torch import nn

from pipeline.diagnosis.beats_evaluate import check_evaluate
from pipeline.diagnosis.beats_offline import check_offline
from pipeline.diagnosis.beats_rollout import answers_of, check_linears, check_rollout, check_start
from pipeline.diagnosis.beats_update import check_after, check_update
from pipeline.diagnosis.compare import Beat, Tolerance
from pipeline.diagnosis.opening import Case
from pipeline.diagnosis.recording import record
from pipeline.diagnosis.truth import read_truth

# Of forward passes. In float32 a padded batch and one row differ by rounding. In bfloat16 a number has 8 bits: a batch and a
# row, or a cached decode and a whole pass, take other roundings in every layer, and single tokens may be a few tenths off.
FORWARD = {torch.float32: Tolerance(1e-3, 2e-4), torch.bfloat16: Tolerance(0.5, 0.05)}
GRADIENT = {torch.float32: 1e-2, torch.bfloat16: 0.3}
"""Relative, of each matrix."""


def check_beats(case: Case, rows: int) -> list[Beat]:
    """One list, in the order of the loop. The policy is left moved."""
    backbone = case.loop.policy.backbone
    truth = read_truth(backbone.causal, case.cfg.uses_reward_model)
    dtype = backbone.head_VH.dtype
    start = [*check_offline(case.reward), *check_start(case.loop, truth)]
    frozen = _frozen(backbone.causal)
    recording = record(case, rows, truth.scale)
    answered = answers_of(recording, 0)
    passes = truth.passes(recording.steps[0].before.adapter, answered, recording.cfg.temperature)
    return [
        *start,
        *check_rollout(recording, truth, answered, passes, FORWARD[dtype]),
        *check_evaluate(case, recording, truth, answered, passes, FORWARD[dtype]),
        *check_update(recording, truth, FORWARD[dtype], GRADIENT[dtype]),
        _check_frozen(frozen, _frozen(backbone.causal)),
        check_linears(backbone.causal, "update: 4-bit layers after it"),
        *check_after(recording, truth, FORWARD[dtype]),
    ]


def _frozen(causal: nn.Module) -> dict[str, str]:
    """Hashes of everything but the policy's adapter."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in causal.named_parameters()
        if ".policy." not in name
    }


def _check_frozen(before: dict[str, str], after: dict[str, str]) -> Beat:
    moved = [name for name in before if before[name] != after[name]]
    found = (
        f"{len(moved)} frozen tensors have moved, the first is {moved[0]}" if moved else "base, sft and reward unmoved"
    )
    return Beat("update: what is frozen", "pipeline/backbone.py, update.py", found, deviates=bool(moved))
