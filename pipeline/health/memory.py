"""Out of memory: an exception, not a curve."""

from pipeline.health.curve import Curve
from pipeline.health.findings import Rule


def _no_curve_shows_it(_: Curve) -> None:
    """The device or the machine has no memory left for a tensor.

    No limit: the stage has stopped.
    """


OUT_OF_MEMORY = Rule(
    "out-of-memory",
    _no_curve_shows_it,
    "A batch, the sampler's cache or the dequantised copy of the base does not fit beside what else holds memory.",
    "Micro-batches and sampled chunks were halved as far as that goes. Set runtime.base_cache to off, "
    "runtime.gradient_checkpointing to true and runtime.logprob_chunk to 128: none of them changes the result beyond "
    "rounding. If it still does not fit, lower tokens.max_prompt, tokens.max_response and lora.r; `make plan` says what each gives.",
)
