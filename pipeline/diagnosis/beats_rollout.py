"""The start of the loop and its first beat: are these the saved weights, and are these their answers?"""

import math

import torch
from torch import Tensor

from pipeline.diagnosis.compare import Beat, Tolerance, compare, explained
from pipeline.diagnosis.naive_model import Adapter, RowPass, live_adapter, live_head, worst_linear
from pipeline.diagnosis.recording import Recording
from pipeline.diagnosis.truth import Rows, Truth
from pipeline.loop import Loop

SAMPLING_LIMIT = 4.0  # standard deviations: by chance once in 16,000 runs
LINEAR_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def answers_of(recording: Recording, iteration: int) -> Rows:
    """(prompt, answer) of each row: the answer is what stands after the prompt that was asked."""
    experience, per_prompt = recording.experiences[iteration], recording.cfg.answers_per_prompt
    prompts = [prompt.ids for prompt in recording.asked[iteration] for _ in range(per_prompt)]
    rows = []
    for row, prompt in enumerate(prompts):
        length = int(experience.response_lengths_B[row])
        rows.append((prompt, experience.tokens_BT[row, len(prompt) : len(prompt) + length].tolist()))
    return rows


def cut(values_BR: Tensor, rows: Rows) -> list[list[float]]:
    """The numbers of each answer's tokens, without padding."""
    return [values_BR[row, : len(answer)].tolist() for row, (_, answer) in enumerate(rows)]


def check_start(loop: Loop, truth: Truth) -> list[Beat]:
    """Before anything has moved: adapters and reward head as saved, the policy a copy of sft, 4-bit layers sound."""
    causal = loop.policy.backbone.causal
    saved = {"sft": truth.sft, "policy": truth.sft}
    if truth.reward is not None:
        saved |= {"reward": truth.reward}
    wrong = [name for name, adapter in saved.items() if not _equal(live_adapter(causal, name, truth.scale), adapter)]
    if truth.reward_head is not None:
        head = live_head(loop.reward_model.head)
        if not (
            torch.equal(head.weight_H, truth.reward_head.weight_H) and torch.equal(head.bias, truth.reward_head.bias)
        ):
            wrong.append("reward head")
    if loop.policy.value_head is not None and any(weight.any() for weight in loop.policy.value_head.parameters()):
        wrong.append("value head, which must start at 0")
    found = f"not as its file has it: {', '.join(wrong)}" if wrong else "as their files have them"
    hint = "the policy must start as a copy of artifacts/sft" if wrong == ["policy"] else ""
    return [
        Beat("start: adapters and heads", "pipeline/loop.py, backbone.py, weights.py", found, bool(wrong), hint),
        check_linears(causal, "start: 4-bit layers"),
    ]


def check_linears(causal: torch.nn.Module, name: str) -> Beat:
    """Do 4-bit layers answer as their dequantised weights?"""
    layer, error = worst_linear(causal)
    limit = LINEAR_LIMIT[causal.get_output_embeddings().weight.dtype]
    if not layer and error == 0.0:
        return Beat(name, "pipeline/quantization.py", "as x times the dequantised weight", deviates=False)
    found = f"{layer} is {error:.1e} off x times its weight"
    return Beat(name, "pipeline/quantization.py", found, deviates=not error <= limit)


def check_rollout(
    recording: Recording, truth: Truth, rows: Rows, passes: list[RowPass], tolerance: Tolerance
) -> list[Beat]:
    """Answers, their log-probabilities, and whether they look drawn from them."""
    experience, temperature = recording.experiences[0], recording.cfg.temperature
    module = "pipeline/rollout.py"
    behaviour = cut(experience.behaviour_logprobs_BR, rows)
    guesses = {
        "temperature 1": lambda: logprobs(truth.passes(recording.steps[0].before.adapter, rows, 1.0)),
        "the sft adapter": lambda: logprobs(truth.passes(truth.sft, rows, temperature)),
        "the raw base": lambda: logprobs(truth.passes(None, rows, temperature)),
    }
    beat = compare("rollout: log-probs", module, behaviour, logprobs(passes), tolerance)
    return [
        _check_answers(recording, rows),
        explained(beat, behaviour, guesses, tolerance),
        _check_draws(passes, temperature),
    ]


def logprobs(passes: list[RowPass]) -> list[list[float]]:
    """Each answer's log-probabilities."""
    return [row.logprobs_R.tolist() for row in passes]


def _check_answers(recording: Recording, rows: Rows) -> Beat:
    """Prompts are intact; an answer ends at its first stop token or at the limit, and says which."""
    experience, stops = recording.experiences[0], set(recording.sampling.stop_ids)
    limit = recording.sampling.max_new_tokens
    faults = []
    for row, (prompt, answer) in enumerate(rows):
        if experience.tokens_BT[row, : len(prompt)].tolist() != prompt:
            faults.append(f"row {row + 1} does not start with the prompt that was asked")
        elif int(experience.prompt_lengths_B[row]) != len(prompt):
            faults.append(f"prompt {row + 1} has {len(prompt)} tokens, not {int(experience.prompt_lengths_B[row])}")
        elif not answer or len(answer) > limit:
            faults.append(f"answer {row + 1} has {len(answer)} tokens where 1 to {limit} may be")
        elif any(token in stops for token in answer[:-1]):
            faults.append(f"answer {row + 1} goes on after a stop token")
        elif answer[-1] not in stops and len(answer) < limit:
            faults.append(f"answer {row + 1} ends before the limit without a stop token")
        elif bool(experience.truncated_B[row]) != (answer[-1] not in stops):
            faults.append(
                f"answer {row + 1} is {'not ' if answer[-1] in stops else ''}cut, but truncated_B says otherwise"
            )
    found = f"{len(faults)} of {len(rows)} rows: {faults[0]}" if faults else "end at a stop token or at the limit"
    return Beat("rollout: answers", "pipeline/rollout.py, batch.py", found, deviates=bool(faults))


def _check_draws(passes: list[RowPass], temperature: float) -> Beat:
    """Tokens drawn from p have -log p equal to p's entropy on average; colder ones less, hotter ones more."""
    surprise = sum(float((-row.logprobs_R - row.entropies_R).sum()) for row in passes)
    deviation = math.sqrt(sum(float(row.variances_R.sum()) for row in passes))
    z = surprise / deviation if deviation > 0 else 0.0
    deviates = not abs(z) <= SAMPLING_LIMIT
    side = "colder or cut off (top-k, top-p, greedy)" if z < 0 else "hotter"
    found = f"{z:+.1f} standard deviations from draws at temperature {temperature:g}"
    hint = f"sampling is {side} than temperature {temperature:g}, of which the log-probs are" if deviates else ""
    return Beat("rollout: draws", "pipeline/rollout.py", found, deviates, hint)


def _equal(one: Adapter, other: Adapter) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].a_RI, pair.a_RI.float()) and torch.equal(one[name].b_OR, pair.b_OR.float())
        for name, pair in other.items()
    )
