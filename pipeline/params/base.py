"""The frozen base and the adapters on it."""

from typing import Literal

from pydantic import field_validator

from pipeline.params.section import Section, param, refuse_without_revision


class BaseParams(Section):
    """Section `base`: which model lies under everything, and how it is held in memory."""

    model: str = param("embedded, tiny, a local folder, or hf://org/name@revision", "embedded")
    quantization: Literal["nf4", "none"] = param(
        "nf4: 4 bits with double quantisation; none: the weights as they are", "nf4"
    )
    dtype: Literal["bfloat16", "float32"] = param(
        "the precision of forward passes; heads and trained weights are always float32", "bfloat16"
    )
    trust_remote_code: bool = param(
        "run Python code that comes with the model; false unless you have read that code", False
    )

    @field_validator("model")
    @classmethod
    def _hub_model_is_pinned(cls, model: str) -> str:
        return refuse_without_revision(model)


class LoraParams(Section):
    """Section `lora`: the shape of every adapter."""

    r: int = param("rank", 16, ge=1, le=512)
    alpha: float = param("the update is scaled by alpha / r", 32.0, gt=0)
    dropout: float = param("on the adapter's input in sft and reward; always off in ppo and dpo", 0.0, ge=0, lt=1)
    targets: str | list[str] = param("all-linear, or the names of the linear layers that get an adapter", "all-linear")


class TokensParams(Section):
    """Section `tokens`: how every stage makes token ids of a conversation."""

    system: str | None = param(
        "system message put before conversations that have none; null leaves that to the model's chat template", None
    )
    system_role: Literal["merge", "drop", "fail"] = param(
        "what becomes of system messages where the model's chat template has no place for them; merge: they go before the user's words",
        "merge",
    )
    max_prompt: int = param("prompts are cut from the left to this many tokens", 256, ge=4)
    max_response: int = param("answers are cut from the right, and sampled up to, this many tokens", 64, ge=1)
