"""Every beat of the loop computed a second time, in the order of the loop; the first that deviates is where to look."""

import hashlib

import torch
from torch import nn

from pipeline.diagnosis.beats_evaluate import check_evaluate
from pipeline.diagnosis.beats_offline import check_offline
from pipeline.diagnosis.beats_rollout import answers_of, check_linears, check_rollout, check_start
from pipeline.diagnosis.beats_update import check_after, check_update
from pipeline.diagnosis.compare import PRECISIONS, Beat
from pipeline.diagnosis.opening import Case
from pipeline.diagnosis.recording import record
from pipeline.diagnosis.truth import read_truth


def check_beats(case: Case, rows: int) -> list[Beat]:
    """One list, in the order of the loop. The policy is left moved."""
    backbone = case.loop.policy.backbone
    truth = read_truth(backbone.causal, case.cfg.uses_reward_model)
    precision = PRECISIONS[backbone.head_VH.dtype]
    start = [*check_offline(case.reward), *check_start(case.loop, truth)]
    frozen = _frozen(backbone.causal)
    recording = record(case, rows, truth.scale)
    answered = answers_of(recording, 0)
    passes = truth.passes(recording.steps[0].before.adapter, answered, recording.cfg.temperature)
    return [
        *start,
        *check_rollout(recording, truth, answered, passes, precision.forward),
        *check_evaluate(case, recording, truth, answered, passes, precision),
        *check_update(recording, truth, precision),
        _check_frozen(frozen, _frozen(backbone.causal)),
        check_linears(backbone.causal, "update: 4-bit layers after it"),
        *check_after(recording, truth, precision.forward),
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
