"""Whether later stages will have something to work with: `prepare` asks, so that nobody trains for hours first."""

from collections.abc import Mapping

from pipeline.data.figures import PairCounts
from pipeline.errors import TrainingError
from pipeline.params.ppo import PPOParams

WATCHED_AND_MEASURED = ("development", "heldout")


def refuse_few_prompts(cfg: PPOParams, prompts: int) -> None:
    """An iteration of the online loop asks different prompts.

    Raises:
        TrainingError: there are fewer than one iteration needs.
    """
    if prompts < cfg.prompts_per_iteration:
        grouped = f" in groups of {cfg.group_size}" if cfg.answers_per_prompt > 1 else ""
        raise TrainingError(
            f"ppo.rollout_size is {cfg.rollout_size}{grouped} but the part ppo has {prompts} prompts, fewer than "
            f"one batch; lower ppo.rollout_size to at most {prompts * cfg.answers_per_prompt}, or raise data.split.ppo."
        )


def refuse_without_pairs(counts: Mapping[str, PairCounts], cut_pairs: Mapping[str, str], max_response: int) -> None:
    """Reward model and judge are trained on pairs of their own, watched on development pairs and measured on held-out ones.

    Args:
        counts: of each part that has pairs.
        cut_pairs: `reward.cut_pairs` and `judge.cut_pairs`, by section.

    Raises:
        TrainingError: a part has none that the section does not leave out.
    """
    for section, way in cut_pairs.items():
        for part in (section, *WATCHED_AND_MEASURED):
            of_part = counts[part]
            if of_part.left(way) == 0:
                raise TrainingError(
                    f"Of {of_part.pairs} pairs in the part {part} none is left for {section}: {of_part.cut} have an answer longer than "
                    f"tokens.max_response {max_response}; raise it, or set {section}.cut_pairs: keep."
                )
