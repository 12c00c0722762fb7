"""The second beat: log-probabilities, values, scores, KL, rewards, advantages; each from what the loop itself had before it."""

import statistics
from collections.abc import Callable

from pipeline.diagnosis import naive_math
from pipeline.diagnosis.beats_rollout import cut, logprobs
from pipeline.diagnosis.compare import ARITHMETIC, Beat, Tolerance, compare, explained
from pipeline.diagnosis.naive_model import RowPass, score_pass
from pipeline.diagnosis.recording import Recording
from pipeline.diagnosis.truth import Rows, Truth

MODULE = "pipeline/evaluation.py"
Numbers = list[list[float]]


def check_evaluate(
    recording: Recording, truth: Truth, rows: Rows, passes: list[RowPass], end_id: int, tolerance: Tolerance
) -> list[Beat]:
    """All beats of `evaluate`, in its order."""
    return [
        *_forwards(recording, truth, rows, passes, tolerance),
        _scores(recording, truth, rows, end_id, tolerance),
        *_rewards(recording, rows),
        *_advantages(recording, rows),
        _figures(recording, rows),
    ]


def _forwards(
    recording: Recording, truth: Truth, rows: Rows, passes: list[RowPass], tolerance: Tolerance
) -> list[Beat]:
    experience, cfg, weights = recording.experiences[0], recording.cfg, recording.steps[0].before
    module = "pipeline/roles.py, evaluation.py"

    def named(adapter) -> Callable[[], Numbers]:
        return lambda: logprobs(truth.passes(adapter, rows, cfg.temperature))

    old, reference = cut(experience.old_logprobs_BR, rows), cut(experience.ref_logprobs_BR, rows)
    ours, theirs = named(weights.adapter), named(truth.sft)
    others = {"the raw base": named(None), "the reward adapter": named(truth.reward)}
    hot = {"another temperature: 1": lambda: logprobs(truth.passes(weights.adapter, rows, 1.0))}
    cold = {"another temperature: 1": lambda: logprobs(truth.passes(truth.sft, rows, 1.0))}
    beats = []
    if cfg.old_logprobs == "recompute":
        beat = compare("evaluate: old log-probs", module, old, logprobs(passes), tolerance)
        beats.append(explained(beat, old, {"the sft adapter": theirs} | others | hot, tolerance))
    beat = compare("evaluate: reference log-probs", module, reference, theirs(), tolerance)
    beats.append(explained(beat, reference, {"the policy": ours} | others | cold, tolerance))
    values = [weights.head(row.states_RH).tolist() for row in passes]
    after = [[*row[1:], row[-1]] for row in values]
    found = cut(experience.values_BR, rows)
    beat = compare("evaluate: values", module, found, values, tolerance)
    beats.append(
        explained(
            beat,
            [row[:-1] for row in found],
            _one("the states AFTER the tokens", [row[:-1] for row in after]),
            tolerance,
        )
    )
    return beats


def _scores(recording: Recording, truth: Truth, rows: Rows, end_id: int, tolerance: Tolerance) -> Beat:
    experience = recording.experiences[0]
    cut_off = experience.truncated_B.tolist()

    def scored(ended: Callable[[list[int], bool], list[int]]) -> Numbers:
        return [
            [score_pass(truth.causal, truth.reward, truth.reward_head, prompt, ended(answer, was_cut))]
            for (prompt, answer), was_cut in zip(rows, cut_off, strict=True)
        ]

    found = [[score] for score in experience.scores_B.tolist()]
    expected = scored(lambda answer, was_cut: [*answer, end_id] if was_cut else answer)
    beat = compare("evaluate: scores", "pipeline/roles.py, the score function", found, expected, tolerance)
    guesses = {
        "answers that were cut, without an end token put after them": lambda: scored(lambda answer, _: answer),
        "the token before the last": lambda: scored(
            lambda answer, was_cut: answer if was_cut else answer[:-1] or answer
        ),
    }
    return explained(beat, found, guesses, tolerance)


def _rewards(recording: Recording, rows: Rows) -> list[Beat]:
    experience, cfg = recording.experiences[0], recording.cfg
    old, reference = cut(experience.old_logprobs_BR, rows), cut(experience.ref_logprobs_BR, rows)
    found = cut(experience.rewards_BR, rows)
    scores = [
        naive_math.shaped_score(score, was_cut, cfg.score_clip, cfg.missing_eos_penalty)
        for score, was_cut in zip(experience.scores_B.tolist(), experience.truncated_B.tolist(), strict=True)
    ]

    def rewards(kl: Callable[[float, float], float], scores: list[float]) -> Numbers:
        return [
            naive_math.token_rewards([kl(o, r) for o, r in zip(*pair, strict=True)], cfg.kl_coef, score)
            for *pair, score in zip(old, reference, scores, strict=True)
        ]

    def kl(o: float, r: float) -> float:
        return naive_math.kl(o, r, cfg.kl_estimator)

    expected = rewards(kl, scores)
    kl_guesses = {
        "KL with its sign flipped": lambda: _but_last(
            rewards(lambda o, r: kl(r, o) if cfg.kl_estimator == "k1" else -kl(o, r), scores)
        ),
        "estimator k1": lambda: _but_last(rewards(lambda o, r: naive_math.kl(o, r, "k1"), scores)),
        "estimator k2": lambda: _but_last(rewards(lambda o, r: naive_math.kl(o, r, "k2"), scores)),
        "estimator k3": lambda: _but_last(rewards(lambda o, r: naive_math.kl(o, r, "k3"), scores)),
        "no KL at all": lambda: _but_last(rewards(lambda o, r: 0.0, scores)),
    }
    # a score that stands on the wrong token is no fault of KL: where it does, the token is left to the next beat
    kl_found, kl_expected = [], []
    for mine, right, score in zip(found, expected, scores, strict=True):
        kept = [t for t in range(len(right) - 1) if abs(mine[t] - right[t] - score) > ARITHMETIC.largest or score == 0]
        kl_found.append([mine[t] for t in kept])
        kl_expected.append([right[t] for t in kept])
    kl_beat = compare("evaluate: KL per token", MODULE, kl_found, kl_expected, ARITHMETIC)
    beat = compare("evaluate: token rewards", MODULE, found, expected, ARITHMETIC)
    raw = experience.scores_B.tolist()
    cut_off = experience.truncated_B.tolist()
    guesses = {
        "the missing-end penalty with its sign flipped": lambda: rewards(
            kl, [s + 2 * cfg.missing_eos_penalty if c else s for s, c in zip(scores, cut_off, strict=True)]
        ),
        "scores without the missing-end penalty": lambda: rewards(
            kl, [naive_math.shaped_score(s, False, cfg.score_clip, 0.0) for s in raw]
        ),
        "the penalty paid by the answers that ended": lambda: rewards(
            kl,
            [
                naive_math.shaped_score(s, not c, cfg.score_clip, cfg.missing_eos_penalty)
                for s, c in zip(raw, cut_off, strict=True)
            ],
        ),
        "no score at all": lambda: rewards(kl, [0.0] * len(scores)),
    }
    return [
        explained(kl_beat, _but_last(found), kl_guesses, ARITHMETIC),
        explained(beat, found, guesses, ARITHMETIC),
    ]


def _advantages(recording: Recording, rows: Rows) -> list[Beat]:
    experience, cfg = recording.experiences[0], recording.cfg
    rewards, values = cut(experience.rewards_BR, rows), cut(experience.values_BR, rows)
    raw = [naive_math.gae(r, v, cfg.gamma, cfg.lam) for r, v in zip(rewards, values, strict=True)]
    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)]
    expected = naive_math.whitened(raw)
    found = cut(experience.advantages_BR, rows)
    beat = compare(
        "evaluate: advantages", "pipeline/advantages.py, algorithms.py, tensors.py", found, expected, ARITHMETIC
    )
    guesses = {
        "advantages that are not whitened": lambda: raw,
        "advantages shifted by one token (each that of the next)": lambda: [[*row[1:], 0.0] for row in expected],
        "advantages shifted by one token (each that of the one before)": lambda: [[0.0, *row[:-1]] for row in expected],
        "advantages with their sign flipped": lambda: [[-a for a in row] for row in expected],
        "advantages without values": lambda: naive_math.whitened(
            [naive_math.gae(r, [0.0] * len(r), cfg.gamma, cfg.lam) for r in rewards]
        ),
        "advantages divided by their deviation but not centred": lambda: _scaled(raw),
        "advantages centred but not divided by their deviation": lambda: _centred(raw),
    }
    beats = [
        explained(beat, found, guesses, ARITHMETIC),
        compare("evaluate: returns", "pipeline/advantages.py", cut(experience.returns_BR, rows), returns, ARITHMETIC),
    ]
    old, behaviour = cut(experience.old_logprobs_BR, rows), cut(experience.behaviour_logprobs_BR, rows)
    weights = [
        [
            1.0 if cfg.old_logprobs == "rollout" else naive_math.importance_weight(o, b)
            for o, b in zip(*pair, strict=True)
        ]
        for pair in zip(old, behaviour, strict=True)
    ]
    found = cut(experience.weights_BR, rows)
    return [*beats, compare("evaluate: importance weights", MODULE, found, weights, ARITHMETIC)]


def _figures(recording: Recording, rows: Rows) -> Beat:
    """What the log says of the rollout."""
    experience, stats = recording.experiences[0], recording.stats[0]
    old, reference = cut(experience.old_logprobs_BR, rows), cut(experience.ref_logprobs_BR, rows)
    scores = experience.scores_B.tolist()
    pairs = [list(zip(*pair, strict=True)) for pair in zip(old, reference, strict=True)]
    k1 = [[naive_math.kl(o, r, "k1") for o, r in row] for row in pairs]
    k3 = [[naive_math.kl(o, r, "k3") for o, r in row] for row in pairs]
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
    beat = compare(
        "log: figures of the rollout",
        MODULE,
        [[stats[name]] for name in expected],
        [[value] for value in expected.values()],
        ARITHMETIC,
        ("figure", "number"),
    )
    return beat


def _one(guess: str, rows: Numbers) -> dict[str, Callable[[], Numbers]]:
    return {guess: lambda: rows}


def _but_last(rows: Numbers) -> Numbers:
    return [row[:-1] for row in rows]


def _flat(rows: Numbers) -> list[float]:
    return [x for row in rows for x in row]


def _scaled(rows: Numbers) -> Numbers:
    deviation = statistics.pstdev(_flat(rows))
    return [[x / deviation for x in row] for row in rows]


def _centred(rows: Numbers) -> Numbers:
    mean = statistics.fmean(_flat(rows))
    return [[x - mean for x in row] for row in rows]
