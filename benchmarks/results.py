"""From the figures of single processes to medians, ratios and what they must be; pure arithmetic."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.floor import beats, shape_of
from benchmarks.plan import FIXED, LONGEST, NF4, OURS, PEER_SETTINGS, SHORTEST, VARIED
from benchmarks.probe import Figures
from benchmarks.work import Work
from pipeline.planning.work import Rates

BEATS = ("iteration", "rollout", "evaluate", "update")
EARLY, LATE = 5, 30  # iterations after which memory is compared

Runs = dict[str, list[Figures]]
"""Of one part: what each probe answered, each time it ran."""
Summary = dict[str, Any]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, extremes and count."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "count": len(values)}


def summarize_ppo(runs: Runs, work: Work) -> Summary:
    """Each probe's beats in seconds, tokens per second, and memory."""
    summary = {}
    for name, figures in runs.items():
        iterations = [seconds for answer in figures for seconds in answer["seconds"]]
        of_beats = {beat: spread(seconds[beat] for seconds in iterations) for beat in BEATS}
        summary[name] = {
            "seconds": of_beats,
            "update_tokens_per_second": work.updated_tokens / of_beats["update"]["median"],
            "rollout_tokens_per_second": work.rows * work.response / of_beats["rollout"]["median"],
            **memory(figures),
        }
    return summary


def memory(figures: list[Figures]) -> Summary:
    """Peak, and how much of it is above the interpreter with its libraries."""
    return {
        "peak_gb": spread(answer["peak_gb"] for answer in figures),
        "above_imports_gb": spread(answer["peak_gb"] - answer["imported_gb"] for answer in figures),
    }


def summarize_rollout(runs: Runs, lengths: dict[str, list[int]]) -> Summary:
    """Each side's new tokens per second, by kind of lengths."""
    return {
        name: {
            kind: spread(sum(lengths[kind]) / seconds for answer in figures for seconds in answer["seconds"][kind])
            for kind in lengths
        }
        for name, figures in runs.items()
    }


def summarize_sft(runs: Runs) -> Summary:
    """Each side's seconds per optimizer step, and memory."""
    return {
        name: {"seconds": spread(second for answer in figures for second in answer["seconds"]), **memory(figures)}
        for name, figures in runs.items()
    }


def summarize_steps(runs: Runs) -> Summary:
    """Peak memory so far, and memory held, after some of the iterations."""
    ((answer,),) = runs.values()
    after = {}
    for step in sorted({4, EARLY, LATE, len(answer["peak_gb_after"])}):
        peak, held = answer["peak_gb_after"][step - 1], answer["resident_gb_after"][step - 1]
        after[str(step)] = {"peak_gb": peak, "held_gb": held}
    return {"after": after}


def summarize_growth(runs: Runs) -> Summary:
    """Seconds of an iteration by beat and peak memory, by what grew."""
    return {
        name: {
            "seconds": {beat: spread(seconds[beat] for seconds in answer["seconds"]) for beat in BEATS},
            "peak_gb": answer["peak_gb"],
        }
        for name, (answer,) in runs.items()
    }


def summarize_rates(runs: Runs, work: Work, model_config: dict[str, Any]) -> Summary:
    """What the machine can do, and the least time for the work."""
    ((answer,),) = runs.values()
    rates = Rates(answer["flops"], answer["bandwidth"])
    least = beats(shape_of(model_config, work.lora_r), rates, work.rows, work.prompt, work.response, work.epochs)
    return {**asdict(rates), "floor_seconds": {beat: getattr(least, beat) for beat in BEATS}}


# --- ratios, from summaries of all parts ---


def time_ratio(parts: Summary) -> float:
    """Our iteration over that of the peer's fastest setting."""
    seconds = {name: of["seconds"]["iteration"]["median"] for name, of in parts["ppo"].items()}
    return seconds[OURS] / min(seconds[name] for name in PEER_SETTINGS)


def memory_ratio(parts: Summary) -> float:
    """Our peak over that of the peer's leanest setting."""
    peaks = {name: of["peak_gb"]["median"] for name, of in parts["ppo"].items()}
    return peaks[OURS] / min(peaks[name] for name in PEER_SETTINGS)


def nf4_ratio(parts: Summary) -> float:
    """An iteration on NF4 with the base cache over one on 16 bits."""
    seconds = {name: of["seconds"]["iteration"]["median"] for name, of in parts["ppo"].items()}
    return seconds[NF4] / seconds[OURS]


def rollout_ratio(parts: Summary, kind: str) -> float:
    """Our tokens per second over plain generate's."""
    ours, plain = (parts["rollout"][side][kind]["median"] for side in (OURS, "plain generate"))
    return ours / plain


def sft_memory_ratio(parts: Summary) -> float:
    """Our SFT over plain PEFT, above the libraries."""
    ours, plain = (parts["sft"][side]["above_imports_gb"]["median"] for side in (OURS, "plain PEFT"))
    return ours / plain


def ppo_over_sft(parts: Summary) -> float:
    """Our PPO over our SFT, above the libraries, at the same micro-batch."""
    return parts["ppo"][OURS]["above_imports_gb"]["median"] / parts["sft"][OURS]["above_imports_gb"]["median"]


def late_over_early(parts: Summary) -> float:
    """Peak memory late over early."""
    after = parts["steps"]["after"]
    return after[str(LATE)]["peak_gb"] / after[str(EARLY)]["peak_gb"]


@dataclass(frozen=True)
class Target:
    """A ratio, the parts that it needs, and what it must be: at most `limit`, or with `at_least` at least that."""

    name: str
    what: str
    needs: tuple[str, ...]
    ratio: Callable[[Summary], float]
    limit: float
    at_least: bool = False

    def judge(self, value: float) -> dict[str, Any]:
        """The value beside its limit."""
        met = value >= self.limit if self.at_least else value <= self.limit
        return {"value": value, "limit": self.limit, "at_least": self.at_least, "met": met, "what": self.what}


TARGETS = (
    Target("time_ratio", "PPO iteration, seconds: ours over TRL's fastest setting", ("ppo",), time_ratio, 1 / 3),
    Target("memory_ratio", "PPO, peak memory: ours over TRL's leanest setting", ("ppo",), memory_ratio, 0.5),
    Target(
        "rollout_fixed",
        "rollout, tokens/s: ours over plain `generate`, equal lengths",
        ("rollout",),
        lambda parts: rollout_ratio(parts, FIXED),
        3.0,
        at_least=True,
    ),
    Target(
        "rollout_varied",
        f"the same, lengths from {SHORTEST} to {LONGEST}",
        ("rollout",),
        lambda parts: rollout_ratio(parts, VARIED),
        5.0,
        at_least=True,
    ),
    Target("ppo_over_sft", "peak memory above the libraries: PPO over SFT", ("ppo", "sft"), ppo_over_sft, 1.2),
    Target("sft_memory", "the same: our SFT over plain PEFT's", ("sft",), sft_memory_ratio, 1.1),
    Target(
        "late_over_early", f"peak memory: iteration {LATE} over iteration {EARLY}", ("steps",), late_over_early, 1.02
    ),
    Target("nf4_ratio", "PPO iteration, seconds: NF4 with base cache over 16 bits", ("ppo",), nf4_ratio, 1.15),
)


def judged(parts: Summary) -> dict[str, dict[str, Any]]:
    """Every target whose parts were measured."""
    return {
        target.name: target.judge(target.ratio(parts))
        for target in TARGETS
        if all(part in parts for part in target.needs)
    }
