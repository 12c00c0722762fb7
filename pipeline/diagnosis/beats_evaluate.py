"""The second beat: log-probabilities, values, scores, KL, rewards, advantages; each from what the loop itself had before it."""

import statistics
from collections.abc import Callable

from pipeline.diagnosis import naive_math
from pipeline.diagnosis.beats_rollout import cut, logprobs
from pipeline.diagnosis.compare import ARITHMETIC, Beat, Precision, Tolerance, compare, explained
from pipeline.diagnosis.naive_model import Adapter, RowPass
from pipeline.diagnosis.naive_rewards import Ending, scores_of
from pipeline.diagnosis.opening import Case
from pipeline.diagnosis.recording import Recording
from pipeline.diagnosis.truth import Rows, Truth

MODULE = "pipeline/evaluation.py"
MATH = "pipeline/advantages.py, algorithms.py, tensors.py"
Numbers = list[list[float]]
Guesses = dict[str, Callable[[], Numbers]]


def check_evaluate(
    case: Case, recording: Recording, truth: Truth, rows: Rows, passes: list[RowPass], precision: Precision
) -> list[Beat]:
    """All beats of `evaluate`, in its order."""
    tolerance = precision.forward
    return [
        *_logprobs(recording, truth, rows, passes, tolerance),
        *_values(recording, rows, passes, tolerance),
        compare(
            "evaluate: entropies",
            "pipeline/tensors.py",
            cut(recording.experiences[0].entropies_BR, rows),
            [row.entropies_R.tolist() for row in passes],
            tolerance,
        ),
        _scores(case, recording, truth, rows, precision.score),
        *_rewards(recording, rows),
        *_advantages(recording, rows),
        _weights(recording, rows),
        _figures(recording, rows),
    ]


def _logprobs(
    recording: Recording, truth: Truth, rows: Rows, passes: list[RowPass], tolerance: Tolerance
) -> list[Beat]:
    experience, cfg, policy = recording.experiences[0], recording.cfg, recording.steps[0].before.adapter
    module = "pipeline/roles.py, evaluation.py"

    def under(adapter: Adapter | None, temperature: float = cfg.temperature) -> Callable[[], Numbers]:
        return lambda: logprobs(truth.passes(adapter, rows, temperature))

    others: Guesses = {"the raw base": under(None)}
    if truth.reward is not None:
        others |= {"the reward adapter": under(truth.reward)}
    beats = []
    if cfg.old_logprobs == "recompute":
        found = cut(experience.old_logprobs_BR, rows)
        guesses = {"the sft adapter": under(truth.sft), **others, "temperature 1": under(policy, 1.0)}
        beat = compare("evaluate: old log-probs", module, found, logprobs(passes), tolerance)
        beats.append(explained(beat, found, guesses, tolerance))
    found = cut(experience.ref_logprobs_BR, rows)
    guesses = {"the policy itself": under(policy), **others, "temperature 1": under(truth.sft, 1.0)}
    beat = compare("evaluate: reference log-probs", module, found, under(truth.sft)(), tolerance)
    return [*beats, explained(beat, found, guesses, tolerance)]


def _values(recording: Recording, rows: Rows, passes: list[RowPass], tolerance: Tolerance) -> list[Beat]:
    head = recording.steps[0].before.head
    if head is None:
        return []
    values = [head(row.states_RH).tolist() for row in passes]
    found = cut(recording.experiences[0].values_BR, rows)
    beat = compare("evaluate: values", "pipeline/roles.py, evaluation.py", found, values, tolerance)
    after = {"the states AFTER the tokens": lambda: [row[1:] for row in values]}
    return [explained(beat, [row[:-1] for row in found], after, tolerance)]


def _scores(case: Case, recording: Recording, truth: Truth, rows: Rows, tolerance: Tolerance) -> Beat:
    experience = recording.experiences[0]
    cut_off = experience.truncated_B.tolist()

    def scores(ending: Ending) -> Numbers:
        return [[score] for score in scores_of(case, truth, rows, cut_off, recording.asked[0], ending)]

    found = [[score] for score in experience.scores_B.tolist()]
    end = case.tokenizer.end_id
    expected = scores(lambda answer, was_cut: [*answer, end] if was_cut else answer)
    beat = compare("evaluate: scores", "pipeline/rewards.py, roles.py", found, expected, tolerance, ("answer", "score"))
    guesses = {
        "answers that were cut, without an end token after them": lambda: scores(lambda answer, _: answer),
        "the state one token too early": lambda: scores(
            lambda answer, was_cut: answer if was_cut else answer[:-1] or answer
        ),
    }
    return explained(beat, found, guesses, tolerance)


def _rewards(recording: Recording, rows: Rows) -> list[Beat]:
    experience, cfg = recording.experiences[0], recording.cfg
    kl_coef = 0.0 if cfg.algorithm == "grpo" else cfg.kl_coef  # GRPO pays for KL in its loss
    pairs = list(zip(cut(experience.old_logprobs_BR, rows), cut(experience.ref_logprobs_BR, rows), strict=True))
    cut_off = experience.truncated_B.tolist()
    raw = experience.scores_B.tolist()
    raw = naive_math.relative(raw) if cfg.normalize_scores else raw
    found = cut(experience.rewards_BR, rows)

    def kls(estimate: Callable[[float, float], float]) -> Numbers:
        return [[estimate(old, reference) for old, reference in zip(*pair, strict=True)] for pair in pairs]

    def shaped(penalty: float, of_cut: bool = True) -> list[float]:
        return [
            naive_math.shaped_score(score, was_cut == of_cut, cfg.score_clip, penalty)
            for score, was_cut in zip(raw, cut_off, strict=True)
        ]

    right_kl = kls(lambda old, reference: naive_math.kl(old, reference, cfg.kl_estimator))

    def rewards(scores: list[float]) -> Numbers:
        return [naive_math.token_rewards(kl, kl_coef, score) for kl, score in zip(right_kl, scores, strict=True)]

    scores = shaped(cfg.missing_eos_penalty)
    expected = rewards(scores)
    beat = compare("evaluate: token rewards", MODULE, found, expected, ARITHMETIC)
    guesses = {
        "the missing-end penalty with its sign flipped": lambda: rewards(shaped(-cfg.missing_eos_penalty)),
        "scores without the missing-end penalty": lambda: rewards(shaped(0.0)),
        "the penalty paid by the answers that ended": lambda: rewards(shaped(cfg.missing_eos_penalty, of_cut=False)),
        "no score at all": lambda: rewards([0.0] * len(scores)),
    }
    beats = [explained(beat, found, guesses, ARITHMETIC)]
    if kl_coef:
        beats.insert(0, _kl(recording, found, expected, right_kl, kls, scores, kl_coef))
    return beats


def _kl(
    recording: Recording,
    found: Numbers,
    expected: Numbers,
    right_kl: Numbers,
    kls: Callable[[Callable[[float, float], float]], Numbers],
    scores: list[float],
    kl_coef: float,
) -> Beat:
    """What the rewards of all tokens but the last say of KL, in nats.

    A score that stands on the wrong token is no fault of KL: such a token is left to the beat of the rewards.
    """
    estimator = recording.cfg.kl_estimator
    kept = [
        [t for t in range(len(right) - 1) if abs(mine[t] - right[t] - score) > ARITHMETIC.largest or not score]
        for mine, right, score in zip(found, expected, scores, strict=True)
    ]
    implied = [[-mine[t] / kl_coef for t in places] for mine, places in zip(found, kept, strict=True)]

    def at_kept(rows: Numbers) -> Numbers:
        return [[row[t] for t in places] for row, places in zip(rows, kept, strict=True)]

    guesses: Guesses = {
        "KL with its sign flipped": lambda: [[-kl for kl in row] for row in at_kept(right_kl)],
        "KL of the reference to the policy": lambda: at_kept(kls(lambda o, r: naive_math.kl(r, o, estimator))),
        "no KL at all": lambda: at_kept(kls(lambda _, __: 0.0)),
        "KL shifted by one token": lambda: at_kept([[*row[1:], 0.0] for row in right_kl]),
        **{
            f"estimator {other}": lambda other=other: at_kept(kls(lambda o, r: naive_math.kl(o, r, other)))
            for other in ("k1", "k2", "k3")
        },
    }
    beat = compare("evaluate: KL per token", MODULE, implied, at_kept(right_kl), ARITHMETIC)
    return explained(beat, implied, guesses, ARITHMETIC)


def _advantages(recording: Recording, rows: Rows) -> list[Beat]:
    experience, cfg = recording.experiences[0], recording.cfg
    rewards = cut(experience.rewards_BR, rows)
    if cfg.algorithm == "ppo":
        values = cut(experience.values_BR, rows)
        raw = [naive_math.gae(r, v, cfg.gamma, cfg.lam) for r, v in zip(rewards, values, strict=True)]
        returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)]
        final = naive_math.whitened(raw)
    elif cfg.algorithm == "reinforce":
        returns = [naive_math.reward_to_go(row, cfg.gamma) for row in rewards]
        raw = naive_math.centred(returns) if cfg.baseline == "batch_mean" else returns
        final = naive_math.scaled(raw)
    else:
        whole = [sum(row) for row in rewards]
        groups = [whole[start : start + cfg.group_size] for start in range(0, len(whole), cfg.group_size)]
        if cfg.algorithm == "rloo":
            estimates = [a for group in groups for a in naive_math.leave_one_out(group)]
            raws = estimates
        else:
            estimates = [a for group in groups for a in naive_math.group_relative(group, cfg.scale_by_std)]
            raws = [a for group in groups for a in naive_math.group_relative(group, by_std=False)]
        returns, raw, final = (
            [[number] * len(row) for number, row in zip(numbers, rewards, strict=True)]
            for numbers in (whole, raws, estimates)
        )
    found, found_raw = cut(experience.advantages_BR, rows), cut(experience.raw_advantages_BR, rows)
    beat = compare("evaluate: advantages", MATH, found, final, ARITHMETIC)
    guesses: Guesses = {
        "advantages that are not whitened or scaled": lambda: raw,
        "advantages scaled but not centred": lambda: naive_math.scaled(raw),
        "advantages centred but not scaled": lambda: naive_math.centred(raw),
        **_shifted(final),
    }
    return [
        explained(
            compare("evaluate: raw advantages", MATH, found_raw, raw, ARITHMETIC), found_raw, _shifted(raw), ARITHMETIC
        ),
        explained(beat, found, guesses, ARITHMETIC),
        compare("evaluate: returns", MATH, cut(experience.returns_BR, rows), returns, ARITHMETIC),
    ]


def _shifted(right: Numbers) -> Guesses:
    return {
        "advantages with their sign flipped": lambda: [[-a for a in row] for row in right],
        "advantages shifted: each token has that of the next": lambda: [[*row[1:], 0.0] for row in right],
        "advantages shifted: each token has that of the one before": lambda: [[0.0, *row[:-1]] for row in right],
    }


def _weights(recording: Recording, rows: Rows) -> Beat:
    """As the loop had them, and as they are where the sampler is far from the policy."""
    found, expected = [], []
    for experience in (recording.experiences[0], recording.shifted):
        found += cut(experience.weights_BR, rows)
        for old, behaviour in zip(
            cut(experience.old_logprobs_BR, rows), cut(experience.behaviour_logprobs_BR, rows), strict=True
        ):
            if recording.cfg.old_logprobs == "rollout":
                expected.append([1.0] * len(old))
            else:
                expected.append([naive_math.importance_weight(o, b) for o, b in zip(old, behaviour, strict=True)])
    return compare("evaluate: importance weights", MODULE, found, expected, ARITHMETIC)


def _figures(recording: Recording, rows: Rows) -> Beat:
    """What the log says of the rollout."""
    experience, stats = recording.experiences[0], recording.stats[0]
    pairs = [
        list(zip(*pair, strict=True))
        for pair in zip(cut(experience.old_logprobs_BR, rows), cut(experience.ref_logprobs_BR, rows), strict=True)
    ]
    k1 = [[naive_math.kl(old, reference, "k1") for old, reference in row] for row in pairs]
    k3 = [[naive_math.kl(old, reference, "k3") for old, reference in row] for row in pairs]
    scores = experience.scores_B.tolist()
    expected = {
        "score_mean": statistics.fmean(scores),
        "score_std": statistics.pstdev(scores),
        "kl_per_sequence_k1": statistics.fmean(map(sum, k1)),
        "kl_per_token_k1": statistics.fmean(_flat(k1)),
        "kl_per_token_k3": statistics.fmean(_flat(k3)),
        "entropy": statistics.fmean(_flat(cut(experience.entropies_BR, rows))),
        "length_mean": statistics.fmean(len(answer) for _, answer in rows),
        "end_token_rate": 1 - statistics.fmean(map(float, experience.truncated_B.tolist())),
    }
    found = [[stats[name]] for name in expected]
    names = ", ".join(expected)
    beat = compare(
        "log: figures of the rollout",
        MODULE,
        found,
        [[right] for right in expected.values()],
        ARITHMETIC,
        ("figure", "number"),
    )
    return beat if not beat.deviates else Beat(beat.name, beat.module, beat.found, True, f"figures in order: {names}")


def _flat(rows: Numbers) -> list[float]:
    return [number for row in rows for number in row]
