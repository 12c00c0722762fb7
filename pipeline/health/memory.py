"""Out of memory: an exception, not a curve."""

import traceback
from pathlib import Path

from pipeline.health.curve import Curve
from pipeline.health.findings import Rule

WORDS = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate")


def out_of_memory(error: BaseException) -> str | None:
    """What an error says of memory and where it came up; None for any other error.

    torch raises `OutOfMemoryError` on a GPU and a plain RuntimeError on a CPU, numpy and Python a MemoryError; torch's CPU
    error is known by its words alone.
    """
    words = str(error).strip().partition("\n")[0]
    if not isinstance(error, MemoryError) and not any(word in words.lower() for word in WORDS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).parent.name in ("pipeline", "stages")]
    place = f" in {Path(ours[-1].filename).name}, {ours[-1].name}" if ours else ""
    return f"{words[:200] or 'MemoryError'}{place}"


def _no_curve_shows_it(_: Curve) -> None:
    """The device or the machine has no memory left for a tensor.

    No limit: the stage has stopped.
    """


OUT_OF_MEMORY = Rule(
    "out-of-memory",
    _no_curve_shows_it,
    "A batch, the sampler's cache or the dequantised copy of the base does not fit beside what else holds memory.",
    "Halve runtime.microbatch_tokens (while sampling: runtime.rollout_chunk) until it fits; then set runtime.base_cache to off, "
    "runtime.gradient_checkpointing to true and runtime.logprob_chunk to 128. None of them changes the result beyond "
    "rounding. If it still does not fit, lower tokens.max_response.",
)
