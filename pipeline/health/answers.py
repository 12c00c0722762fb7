"""Rules of the online loop about the answers: repetition, length, ends, variety.

"At the start" is the first iteration, whose answers are the SFT model's; "lately" is the mean of the last three.
"""

from pipeline.health.curve import Curve, first, recent
from pipeline.health.findings import Rule

BARE_ENDS = 0.1
CUT_MORE = 0.3


def repeated_text(curve: Curve) -> str | None:
    """Different pairs of tokens among all of a rollout are lately less than 0.6 of the share at the start.

    The share falls by itself as answers grow: with twice the tokens to about 0.8. In the demo it moves by 2%.
    """
    before, now = first(curve, "distinct_2"), recent(curve, "distinct_2")
    return f"distinct pairs of tokens fell from {before:.0%} to {now:.0%}" if now < 0.6 * before else None


def length_collapse(curve: Curve) -> str | None:
    """Answers are lately less than half as long as at the start, or one more in ten is a bare end token than twice the share at the start.

    Reports huggingface/trl#522 and hiyouga/LLaMA-Factory#803. In the demo, whose chosen answers are brief, they shrink to 0.77.
    """
    before, now = first(curve, "length_mean"), recent(curve, "length_mean")
    bare_before, bare = first(curve, "end_token_only_rate"), recent(curve, "end_token_only_rate")
    if now < before / 2 or bare > BARE_ENDS + 2 * bare_before:
        ends = f", {bare:.0%} of them a bare end token" if bare > 0 else ""
        return f"answers have {now:.3g} tokens, {before:.3g} at the start{ends}"
    return None


def length_blow_up(curve: Curve) -> str | None:
    """Answers are lately twice as long as at the start, or 30 points more of them are cut.

    In the demo they grow to 1.17 on the way, and 11 points more are cut. Where the limit leaves no room for twice the length,
    the cut ones tell.
    """
    before, now = first(curve, "length_mean"), recent(curve, "length_mean")
    cut_before, cut = 1 - first(curve, "end_token_rate"), 1 - recent(curve, "end_token_rate")
    if now > 2 * before or cut > cut_before + CUT_MORE:
        return f"answers have {now:.3g} tokens, {before:.3g} at the start; {cut:.0%} are cut, {cut_before:.0%} at the start"
    return None


def answers_cut(curve: Curve) -> str | None:
    """At the first iteration more than half of the answers are cut.

    An SFT model that has seen answers end ends its own: 85 to 97% in the demo.
    """
    cut = 1 - first(curve, "end_token_rate")
    return f"{cut:.0%} of the SFT model's answers are cut before they end" if cut > 0.5 else None


def entropy_collapse(curve: Curve) -> str | None:
    """Entropy per token is lately below a quarter of that at the start.

    Learning lowers it, in the demo to 0.61. At a quarter, rollouts of one prompt are nearly all the same answer.
    """
    before, now = first(curve, "entropy"), recent(curve, "entropy")
    return f"entropy fell from {before:.3g} to {now:.2g} nats per token" if now < before / 4 else None


RULES = (
    Rule(
        "repeated-text",
        repeated_text,
        "The reward model likes a phrase, and the policy says it over and over, or says the same to every prompt.",
        "Double ppo.kl_coef, and halve ppo.lr.",
    ),
    Rule(
        "length-collapse",
        length_collapse,
        "The reward model prefers short answers, and ending at once is the quickest way to please it.",
        "Double ppo.kl_coef; if ppo.gamma is below 1, set it to 1.0; if length alone ranks the pairs well in "
        "metrics/reward.json, the data teach it.",
    ),
    Rule(
        "length-blow-up",
        length_blow_up,
        "The reward model prefers long answers, or the policy has unlearnt to end.",
        "Double ppo.missing_eos_penalty and ppo.kl_coef; if length alone ranks the pairs well in metrics/reward.json, the "
        "data teach it.",
    ),
    Rule(
        "answers-cut",
        answers_cut,
        "The limit is shorter than the answers that SFT was taught, or SFT has not learnt to end them.",
        "Double tokens.max_response, or raise sft.epochs by 1.",
    ),
    Rule(
        "entropy-collapse",
        entropy_collapse,
        "The policy has settled on one answer to each prompt and no longer explores: steps too large, or KL too cheap.",
        "Halve ppo.lr, and double ppo.kl_coef.",
    ),
)
