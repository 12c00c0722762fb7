"""What `make bench` measures, in which order."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.setting import ROLLOUT_VARIANTS, our_setting, rows_at_once
from benchmarks.work import Work, spread_lengths

OURS, PEER = "ours", "peer"
NF4 = "ours, NF4 with base cache"
PEER_SETTINGS: dict[str, dict[str, Any]] = {
    "TRL, micro-batch 4": {"microbatch": 4},
    "TRL, micro-batch 16": {"microbatch": 16},
    # its leanest: the value copy trained by LoRA, adapters in 16 bits
    "TRL, leanest": {"microbatch": 4, "value": "lora", "adapters": "bfloat16"},
}
FIXED, VARIED = "fixed", "varied"
SHORTEST, LONGEST = 8, 64
LENGTHS = (64, 256, 1024)  # tokens of a row
ROWS = (4, 16, 64)
GROWING = Work(rows=4, response=16)
MANY_STEPS = Work(rows=4, prompt=24, response=8, epochs=1, warmup=0, iterations=64)


@dataclass(frozen=True)
class Probe:
    """One fresh process. side: whose environment it runs in."""

    name: str
    side: str
    module: str
    request: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Probes that are run one after the other, the whole round several times where it is `repeated`.

    Times of two sides are comparable when they were taken in turn: a machine is not equally fast all day.
    """

    name: str
    probes: tuple[Probe, ...]
    repeated: bool = False


def parts(work: Work, model: str) -> list[Part]:
    """All parts. model: the folder of the embedded model."""
    return [
        Part("rates", (Probe("machine", OURS, "benchmarks.rates", work.request()),)),
        Part("ppo", _ppo(work, model), repeated=True),
        Part("rollout", _rollout(work, model), repeated=True),
        Part("sft", _sft(work, model)),
        Part("steps", (_ours(f"{MANY_STEPS.iterations} iterations", MANY_STEPS, model),)),
        Part("growth", _growth(model)),
    ]


PART_NAMES = ("rates", "ppo", "rollout", "sft", "steps", "growth")


def _ours(name: str, work: Work, model: str, **more: Any) -> Probe:
    return Probe(name, OURS, "benchmarks.ours.ppo", work.request(model=model, **more))


def _ppo(work: Work, model: str) -> tuple[Probe, ...]:
    """Ours before each setting of the peer; NF4 last, after one more of ours."""
    ours = _ours(OURS, work, model)
    round_: list[Probe] = []
    for name, setting in PEER_SETTINGS.items():
        round_ += [ours, Probe(name, PEER, "benchmarks.peer.ppo", work.request(model=model, setting=setting))]
    nf4 = {"base": {"quantization": "nf4"}, "runtime": {"base_cache": "on"}}
    return (*round_, ours, _ours(NF4, work, model, changes=nf4))


def _rollout(work: Work, model: str) -> tuple[Probe, ...]:
    lengths = {FIXED: [work.response] * work.rows, VARIED: spread_lengths(work.rows, SHORTEST, LONGEST)}
    request = work.request(model=model, lengths=lengths)
    variants = (
        Probe(name, OURS, "benchmarks.ours.rollout", request | {"changes": changes})
        for name, changes in ROLLOUT_VARIANTS.items()
    )
    return (
        Probe(OURS, OURS, "benchmarks.ours.rollout", request),
        Probe("plain generate", PEER, "benchmarks.peer.generate", request),
        *variants,
    )


def _sft(work: Work, model: str) -> tuple[Probe, ...]:
    return (
        Probe(OURS, OURS, "benchmarks.ours.sft", work.request(model=model)),
        Probe(
            "plain PEFT",
            PEER,
            "benchmarks.peer.sft",
            work.request(model=model, microbatch=rows_at_once(our_setting(work).runtime, work.row_tokens)),
        ),
    )


def growing() -> dict[str, Work]:
    """Rows that get longer, then more rows; by what the table calls them."""
    longer = [replace(GROWING, prompt=length - GROWING.response) for length in LENGTHS]
    more = [replace(GROWING, prompt=LENGTHS[0] - GROWING.response, rows=rows) for rows in ROWS]
    return {f"{work.rows} rows of {work.row_tokens} tokens": work for work in (*longer, *more)}


def _growth(model: str) -> tuple[Probe, ...]:
    return tuple(_ours(name, work, model) for name, work in growing().items())
