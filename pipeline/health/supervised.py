"""Rules of every loop, and of the supervised stages. A look's docstring says when it speaks, and why not sooner."""

import math

from pipeline.health.curve import Curve, first, last, mean, rise, values
from pipeline.health.findings import Rule

WINDOW = 10  # optimizer steps: a loss on one batch is noise
LOSS_RISE = 1.05
SURE = 3.0  # standard errors: the question is asked at every step, and two would cry wolf once in forty
AT_CHANCE = 0.55


def not_finite(curve: Curve) -> str | None:
    """A figure is NaN or infinite, or an optimizer step was left out because its loss or gradient was.

    No limit: one is one too many, although the step was not taken and no weight was touched.
    """
    broken = [name for name, value in curve[-1].items() if isinstance(value, float) and not math.isfinite(value)]
    if broken:
        return f"not finite: {', '.join(broken)}"
    share = last(curve, "non_finite_steps")
    return f"loss or gradient was not finite in {share:.0%} of the optimizer steps" if share > 0 else None


def loss_rises(curve: Curve) -> str | None:
    """The mean loss of the last 10 steps is 5% above that of the 10 before, and by more than 3 standard errors.

    Batches differ: the demo's loss moves by a tenth from one batch to the next while it falls.
    """
    before, after = values(curve[-2 * WINDOW : -WINDOW], "loss"), values(curve[-WINDOW:], "loss")
    if len(before) < WINDOW:
        return None
    risen, error = rise(before, after)
    if risen > SURE * error and mean(after) > LOSS_RISE * mean(before):
        return f"loss {mean(before):.3g} over {WINDOW} steps, {mean(after):.3g} over the next {WINDOW}"
    return None


def accuracy_at_chance(curve: Curve) -> str | None:
    """In the second half of training the chosen answer scores higher in less than 55% of the pairs of the last 10 steps.

    Half is chance, and 160 pairs leave a standard error of 4 points. A learning rate that has fallen below half its peak
    is how the curve says that half the training is over.
    """
    right = mean(values(curve[-WINDOW:], "accuracy"))
    if len(curve) >= WINDOW and right < AT_CHANCE:
        rates = values(curve, "lr_adapter")
        if rates[-1] < max(rates) / 2:
            return f"{right:.0%} of the training pairs are ranked right, over {WINDOW} steps"
    return None


def no_gain(result: Curve) -> str | None:
    """On the development prompts the loss after training is not below that before.

    No limit: the same rows with the same weights give the same loss, so any gain shows.
    """
    before, after = first(result, "development_loss_before"), first(result, "development_loss")
    return f"development loss {before:.4g} before, {after:.4g} after" if after >= before else None


def behind_baseline(result: Curve) -> str | None:
    """On the development pairs it is right no more often than length alone or a bag of words.

    No limit: what costs nothing must be beaten, or the score is length, or words, under another name.
    """
    accuracy = first(result, "development_accuracy")
    rivals = {
        "length alone": first(result, "development_accuracy_length_alone"),
        "a bag of words": first(result, "development_accuracy_bag_of_words"),
    }
    ahead = {name: rival for name, rival in rivals.items() if rival >= accuracy}
    if ahead:
        beside = ", ".join(f"{name} in {rival:.0%}" for name, rival in ahead.items())
        return f"right in {accuracy:.0%} of the development pairs; {beside}"
    return None


NOT_FINITE = Rule(
    "not-finite",
    not_finite,
    "A learning rate that blows the weights up, 16-bit overflow, or a broken row in the data.",
    "Divide {stage}.lr by 3; if it stays, set base.dtype to float32.",
)
LOSS_RISES = Rule(
    "loss-rises",
    loss_rises,
    "The learning rate is too high, so that steps leap over the valley; or the later rows are of another kind.",
    "Divide {stage}.lr by 3, or lower {stage}.max_grad_norm to 0.3.",
)
ACCURACY_AT_CHANCE = Rule(
    "accuracy-at-chance",
    accuracy_at_chance,
    "The learning rate is too low to learn anything, or chosen and rejected are mixed up or the same.",
    "Multiply {stage}.lr by 3, or raise {stage}.epochs by 1; read ten pairs of data.pairs.",
)
NO_GAIN = Rule(
    "no-gain",
    no_gain,
    "The learning rate is far too low or too high, or the training rows are of another kind than the watched ones.",
    "If the training loss fell, halve sft.epochs; if it did not, multiply sft.lr by 3; if it rose, divide it by 3.",
)
BEHIND_BASELINE = Rule(
    "behind-baseline",
    behind_baseline,
    "It has learnt the surface of the answers, their length or their words, or has too few pairs to learn more.",
    "Raise data.split.{stage} or {stage}.epochs; `make check-data` says whether length alone tells chosen from rejected.",
)
