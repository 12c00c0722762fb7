"""Rules of the online loop about learning: KL, scores, advantages, steps, critic.

They read raw scores and raw advantages: whitening would hide what is wrong with them. A look's docstring says when it
speaks, and why the limit is where it is. "At the start" is the first iteration, whose answers are the SFT model's;
"lately" is the mean of the last three iterations.
"""

from pipeline.health.curve import RECENT, Curve, always, first, last, mean, recent, rise, values
from pipeline.health.findings import Rule

ITERATIONS = 8  # before a score is called flat
WINDOW = 10  # iterations compared at either end, at most
KL_MOVED = 1.0  # nats per answer
KL_AT_START = 0.01  # nats per answer
KL_NEGATIVE = -1.0  # nats per answer
KL_JUMP = 0.15  # nats per token
KL_FAR = 25.0  # nats per answer
SPREAD = 0.1  # of scores
FEW_POSITIVE = 0.05
CLIPPED = 0.3
WORSE_THAN_A_CONSTANT = -0.1
CRITIC_ROWS = 5


def kl_at_start(curve: Curve) -> str | None:
    """KL to the reference before the first update is not 0.

    Policy and reference start with equal weights and are scored in passes of one shape: the log-ratio is exactly 0, in any
    precision. 0.01 nats an answer is beyond what rounding could ever do.
    """
    start = first(curve, "kl_per_sequence_k1")
    if curve[-1].get("step") == 0 and abs(start) > KL_AT_START:
        return f"KL to the SFT model is {start:.3g} nats per answer before the first update"
    return None


def kl_negative(curve: Curve) -> str | None:
    """k1 is below -1 nat per answer.

    Report huggingface/trl#487. KL is never negative, and its estimate from honest samples hardly: at a true KL of k nats
    one answer's k1 has a standard deviation of about sqrt(2 k), so that with 32 answers -1 lies eight standard errors or
    more away, whatever k.
    """
    kl = last(curve, "kl_per_sequence_k1")
    return f"KL to the SFT model reads {kl:.3g} nats per answer" if kl < KL_NEGATIVE else None


def kl_spike(curve: Curve) -> str | None:
    """KL per token is twice that of each of the three iterations before, and 0.15 nats above them.

    In the demo it grows by at most 0.12 nats in one iteration, and that from a level where it does not double.
    """
    before, now = values(curve[:-1][-RECENT:], "kl_per_token_k1"), last(curve, "kl_per_token_k1")
    if before and all(now > 2 * kl and now > kl + KL_JUMP for kl in before):
        return f"KL to the SFT model jumped from {before[-1]:.3g} to {now:.3g} nats per token in one iteration"
    return None


def over_optimisation(curve: Curve) -> str | None:
    """The score is above its start while KL is lately above 25 nats per answer.

    The usual target of an adaptive coefficient is 6 nats (Ziegler et al. 2019), and the demo keeps no policy beyond 15.
    Farther out a reward model's score goes on rising while people's judgement falls (Stiennon et al. 2020, section 4.3;
    Gao et al. 2023).
    """
    kl, before, now = recent(curve, "kl_per_sequence_k1"), first(curve, "score_mean"), recent(curve, "score_mean")
    if kl > KL_FAR and now > before:
        return f"score rose from {before:.3g} to {now:.3g} at {kl:.3g} nats per answer from the SFT model"
    return None


def policy_still(curve: Curve) -> str | None:
    """After 8 iterations the score has not risen beyond noise, and KL is lately below 1 nat per answer.

    Noise is two standard errors of the difference between the first and the last iterations, at most 10 of each. Taking the
    best of 8 answers costs 1.2 nats and gains 1.4 standard deviations of score: below 1 nat a policy has hardly tried.
    """
    flat, kl = _flat(curve), recent(curve, "kl_per_sequence_k1")
    return f"{flat}, and the policy is {kl:.2g} nats per answer from the SFT model" if flat and kl < KL_MOVED else None


def score_flat(curve: Curve) -> str | None:
    """After 8 iterations the score has not risen beyond noise, although KL is lately 1 nat per answer or more.

    As for `policy-still`: a nat should have bought a standard deviation of score.
    """
    flat, kl = _flat(curve), recent(curve, "kl_per_sequence_k1")
    return f"{flat}, at {kl:.3g} nats per answer from the SFT model" if flat and kl >= KL_MOVED else None


def scores_without_spread(curve: Curve) -> str | None:
    """In the last three iterations the standard deviation of raw scores is below 0.1, or lately more than half of the answers have no advantage.

    Scores are log-odds: answers that differ by 0.14, as two with that deviation do, are preferred to one another 53 to 47.
    With rloo and grpo the answers to one prompt may all score alike; where that is the rule, most of a rollout is in vain.
    Where the score has risen by more than its standard deviation at the start, nothing is said: the best score may be reached.
    """
    if recent(curve, "score_mean") - first(curve, "score_mean") > max(SPREAD, first(curve, "score_std")):
        return None
    spreads = always(curve, "score_std")
    if all(spread < SPREAD for spread in spreads):
        middle = last(curve, "score_mean")
        return f"the standard deviation of the answers' scores is {mean(spreads):.2g}, around a mean of {middle:.3g}"
    idle = recent(curve, "answers_without_advantage")
    return (
        f"{idle:.0%} of the answers are worth no more and no less than what they are compared with"
        if idle > 0.5
        else None
    )


def advantages_negative(curve: Curve) -> str | None:
    """In the last three iterations less than 5% of the tokens have a raw advantage above 0.

    A critic that knows the mean leaves about half above. Whitening shifts them, so the update still has both signs, but
    what it calls good is then only the less bad. Two iterations are granted to a value head that starts at 0.
    """
    shares = always(curve, "advantage_positive_share")
    middle = last(curve, "advantage_mean")
    if all(share < FEW_POSITIVE for share in shares) and middle < 0:
        return f"{shares[-1]:.0%} of the raw advantages are above 0 (mean {middle:.3g}), for {RECENT} iterations now"
    return None


def clipping(curve: Curve) -> str | None:
    """Lately more than 30% of the tokens are clipped.

    A clipped token gives no gradient. Working runs clip a few percent to a fifth, the demo 5 to 8%.
    """
    share = recent(curve, "clip_fraction")
    return f"{share:.0%} of the tokens are clipped" if share > CLIPPED else None


def updates_cut_short(curve: Curve) -> str | None:
    """Lately `ppo.stop_kl` leaves out more than half of the optimizer steps.

    As a brake now and then it is meant to act; where it always does, most of each rollout is thrown away.
    """
    taken, skipped = recent(curve, "update_steps"), recent(curve, "update_steps_skipped")
    if skipped > taken >= 0:
        share = skipped / (taken + skipped)
        return f"{share:.0%} of the optimizer steps are left out, as the policy moves too far before them"
    return None


def critic_misleads(curve: Curve) -> str | None:
    """In each of the last five iterations the explained variance of returns is below -0.1.

    0 is what a constant reaches, and where a value head starts; a tenth is left to noise.
    """
    explained = always(curve, "explained_variance", CRITIC_ROWS)
    if all(share < WORSE_THAN_A_CONSTANT for share in explained):
        return f"explained variance {explained[-1]:.2g}, below 0 for {CRITIC_ROWS} iterations"
    return None


def _flat(curve: Curve) -> str | None:
    """That the score has not risen, with the numbers. Iterations in which the critic warms up alone do not count."""
    moving = [row for row in curve if "policy_loss" in row]
    size = min(len(moving) // 2, WINDOW)
    if len(moving) < ITERATIONS:
        return None
    before, after = values(moving[:size], "score_mean"), values(moving[-size:], "score_mean")
    risen, error = rise(before, after)
    if risen <= 2 * error:
        return f"mean score {mean(before):.3g} in the first {size} iterations, {mean(after):.3g} in the last {size}"
    return None


RULES = (
    Rule(
        "kl-at-start",
        kl_at_start,
        "The reference is not the model that the policy starts from, or the two are computed in different ways.",
        "Set base.quantization to none and base.dtype to float32; if it stays, the code is at fault: report it.",
    ),
    Rule(
        "kl-negative",
        kl_negative,
        "Answers are not samples of the policy: padding counts as text, or sampling and scoring differ.",
        "If ppo.old_logprobs is not recompute, or ppo.temperature not 1, make them so; if it stays, report it.",
    ),
    Rule(
        "kl-spike",
        kl_spike,
        "One update has thrown the policy far: the learning rate is too high, or a few advantages are huge.",
        "Divide ppo.lr by 3, or set ppo.stop_kl to 0.05; if scores have outliers, lower ppo.score_clip to 5.",
    ),
    Rule(
        "over-optimisation",
        over_optimisation,
        "The policy is finding what the reward model is wrong about: the score rises, the answers need not be better.",
        "Double ppo.kl_coef, or halve ppo.iterations; if ppo.keep is last, set it to best, which keeps a nearer policy. "
        "plots/overoptimisation.tsv has the judge's view.",
    ),
    Rule(
        "policy-still",
        policy_still,
        "The updates are too small: a learning rate meant for full fine-tuning, few steps, or a high price of KL.",
        "Multiply ppo.lr by 3 (LoRA wants 1e-4 to 1e-3), or double ppo.iterations; if ppo.kl_coef is above 0.1, halve it.",
    ),
    Rule(
        "score-flat",
        score_flat,
        "The policy moves, but not toward the score: advantages are mostly noise, or the score tells nothing of the answer.",
        "Double ppo.rollout_size and ppo.minibatch_size; if that does not help, see in metrics/reward.json whether the "
        "reward model beats its baselines.",
    ),
    Rule(
        "scores-without-spread",
        scores_without_spread,
        "The reward model cannot tell the answers apart, or all answers have become the same.",
        "Multiply reward.lr by 3, or raise reward.epochs by 1, until it beats its baselines in metrics/reward.json; if "
        "distinct_2 has fallen too, double ppo.kl_coef.",
    ),
    Rule(
        "advantages-negative",
        advantages_negative,
        "The critic expects more than any answer gets: scores lie far below 0, or a penalty falls on every answer.",
        "Set ppo.critic_warmup to 2 and double ppo.value_lr (with reinforce, set ppo.baseline to batch_mean); if most answers "
        "are cut, see answers-cut.",
    ),
    Rule(
        "clipping",
        clipping,
        "Within one rollout the policy moves too far: too large steps, or too many of them.",
        "Halve ppo.lr; if ppo.epochs is above 1, lower it.",
    ),
    Rule(
        "updates-cut-short",
        updates_cut_short,
        "The learning rate is too high for the limit on KL within one update.",
        "Halve ppo.lr; if ppo.epochs is above 1, lower it; leave ppo.stop_kl where it is.",
    ),
    Rule(
        "critic-misleads",
        critic_misleads,
        "The value head's predictions are worse than none: its steps are too large, or the scores have changed under it.",
        "Divide ppo.value_lr by 3, or set ppo.critic_warmup to 2.",
    ),
)
