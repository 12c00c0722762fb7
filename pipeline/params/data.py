"""Section `data`: where the rows come from and how they are divided."""

from typing import Literal

from pydantic import field_validator, model_validator

from pipeline.params.section import Section, param

FROM_PAIRS = "data/from-pairs"


class SplitParams(Section):
    """Prompts are divided by the rank of a hash: first fixed numbers for measuring, then shares for training.

    Prompts that cannot serve every part, as those that have a demonstration but no pair, are divided by the shares of the
    parts that they can serve.
    """

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
    """Section `data`. The three sources are each a file, a folder, or a .hf file that names a data set of the hub."""

    pairs: str = param("preference pairs", "data/demo")
    demonstrations: str = param("answers to imitate in sft; data/from-pairs: the chosen ones of some pairs", FROM_PAIRS)
    prompts: str = param("what PPO answers; data/from-pairs: the prompts of some pairs", FROM_PAIRS)
    shape: Literal[
        "auto",
        "prompt-pairs",
        "question-pairs",
        "instruction-pairs",
        "input-pairs",
        "sharegpt-pairs",
        "hh-transcripts",
        "conversation-pairs",
        "chosen-messages",
        "messages-rejected",
        "openai-pairs",
        "prompt-ranked",
        "question-ranked",
        "instruction-ranked",
        "messages",
        "sharegpt",
        "conversation",
        "alpaca",
        "dolly",
        "seed-tasks",
        "prompt-completion",
        "prompt-response",
        "question-answer",
        "question-response",
        "query-response",
        "input-output",
        "problem-solution",
        "prompt-alone",
        "question-alone",
        "instruction-alone",
    ] = param("how files that can be read in two ways are read; it concerns the source that wants this kind", "auto")
    expand_rankings: bool = param("make a pair of every answer of a ranked list and every later one", False)
    max_bad_share: float = param(
        "the run stops when a larger share of a source's rows cannot be used", 0.02, ge=0, le=1
    )
    max_prompts: int | None = param("use only this many prompts, chosen by hash; null for all", None, ge=1)
    split: SplitParams

    @field_validator("pairs", "demonstrations", "prompts")
    @classmethod
    def _dvc_can_follow_it(cls, path: str) -> str:
        if path.startswith("hf://"):
            raise ValueError(
                f"is {path!r} but DVC follows files, not hub addresses; write that line into a file, "
                "for example data/mine.hf, and name the file here."
            )
        return path

    @property
    def sources(self) -> dict[str, str]:
        """The path of each kind of record that has a source of its own; pairs always have one."""
        others = {"demonstrations": self.demonstrations, "prompts": self.prompts}
        return {"pairs": self.pairs} | {kind: path for kind, path in others.items() if path != FROM_PAIRS}
