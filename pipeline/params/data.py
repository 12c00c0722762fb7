"""Section `data`: where the pairs come from and how they are divided."""

from pydantic import model_validator

from pipeline.params.section import Section, param


class SplitParams(Section):
    """Prompts are divided by the rank of a hash: first fixed numbers for measuring, then shares for training."""

    heldout: int = param("prompts that only `evaluate` sees, once", 100, ge=1)
    development: int = param("prompts for watching and tuning", 40, ge=1)
    sft: float = param("share of the remaining prompts for supervised fine-tuning", 0.3, gt=0, lt=1)
    reward: float = param("share for the reward model", 0.3, gt=0, lt=1)
    judge: float = param("share for the judge, which PPO never sees", 0.2, gt=0, lt=1)
    ppo: float = param("share of the prompts that PPO samples from", 0.2, gt=0, lt=1)

    @model_validator(mode="after")
    def _shares_make_one(self) -> "SplitParams":
        total = self.sft + self.reward + self.judge + self.ppo
        if abs(total - 1) > 1e-9:
            raise ValueError(f"data.split: sft + reward + judge + ppo is {total:g} but must be 1; adjust one of them.")
        return self


class DataParams(Section):
    """Section `data`."""

    pairs: str = param("a .json, .jsonl or .jsonl.gz file of preference pairs, or a folder of such files", "data/demo")
    max_bad_share: float = param("the run stops when a larger share of rows cannot be used", 0.02, ge=0, le=1)
    max_prompts: int | None = param("use only this many prompts, chosen by hash; null for all", None, ge=1)
    split: SplitParams
