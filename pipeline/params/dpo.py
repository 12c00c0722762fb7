"""Section `dpo`: direct preference optimisation, the alternative to reward model and PPO."""

from typing import Literal

from pipeline.params.section import param
from pipeline.params.training import TrainingParams


class DPOParams(TrainingParams):
    """Section `dpo`. The learning rate falls to a tenth along a cosine."""

    beta: float = param(
        "what a nat of distance to the SFT model costs: an implicit reward is beta times the log-ratio to it",
        0.1,
        gt=0,
        usual=(0.01, 0.5),
        why="below, the policy runs away from the SFT model; above, it hardly leaves it",
    )
    label_smoothing: float = param(
        "share of the pairs whose labels are thought to be swapped (conservative DPO); 0 trusts every label",
        0.0,
        ge=0,
        lt=0.5,
    )
    cut_pairs: Literal["drop", "keep"] = param(
        "pairs with an answer cut by tokens.max_response: a policy should be shown answers that end", "drop"
    )
