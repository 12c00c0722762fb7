"""The tables of docs/performance.md, made from benchmarks/results/peer.json, so that no figure is typed by hand.

python -m benchmarks.render        rewrites what stands between the two marks
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.plan import OURS, growing
from benchmarks.results import BEATS, TARGETS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results/peer.json"
BEGIN, END = "<!-- python -m benchmarks.render: begin -->", "<!-- end -->"
NOTHING = "Not run yet: `make bench` measures, `python -m benchmarks.render` puts the tables here."

Report = dict[str, Any]


def markdown(report: Report) -> str:
    """Every table whose part was measured."""
    parts = report["parts"]
    sections = [_circumstances(report)]
    if report["targets"]:
        sections.append(_targets(report["targets"]))
    sections += [table(parts[name]) for name, table in _TABLES.items() if name in parts]
    return "\n\n".join(sections)


def block(report: Report | None) -> str:
    """What stands between the marks."""
    return NOTHING if report is None else markdown(report)


def with_block(page: str, content: str) -> str:
    """The page with other content between the marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{content}\n\n{END}{tail}"


def read_report() -> Report | None:
    """The last whole run's, if there was one."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None


def _circumstances(report: Report) -> str:
    machine, work, load = report["machine"], report["work"], report["load"]
    units = " with AMX" if machine["amx_bf16"] else ", AVX512-BF16, no AMX" if machine["avx512_bf16"] else ""
    versions = "; ".join(
        f"{side}: {', '.join(f'{package} {version}' for package, version in sorted(packages.items()))}"
        for side, packages in sorted(report["versions"].items())
    )
    waiting = ", ".join(f"{name}={value}" for name, value in machine["waiting"].items())
    changed = ", ".join(f"`runtime.{key}: {value}`" for key, value in sorted(report["runtime"].items()))
    return (
        f"{machine['cores']} cores, {machine['processor']}{units}, {work['threads']} threads, {waiting} for both sides; "
        f"load {load['before'][0]:.2f} before, {load['after'][0]:.2f} after, {load['others_share']:.1%} of the cores' time taken by other processes; "
        f"{report['repetitions']} repetitions in turn, {report['minutes']:.0f} minutes; medians, in brackets the extremes. {versions}.\n\n"
        f"Work: {work['rows']} prompts of {work['prompt']} tokens, {work['response']} new tokens each, no early stop, {work['epochs']} epochs, "
        f"LoRA r={work['lora_r']} on all linears, bfloat16, SmolLM2-135M. Ours has one setting: recipes/demo.yaml with "
        f"{changed}; benchmarks/results/peer.json states every value."
    )


def _targets(targets: Report) -> str:
    rows = []
    for target in TARGETS:
        if found := targets.get(target.name):
            sign = "at least" if found["at_least"] else "at most"
            met = "yes" if found["met"] else "**no**"
            rows.append([found["what"], f"{found['value']:.3g}", f"{sign} {found['limit']:.3g}", met])
    return _table(["ratio", "measured", "aim", "met"], rows)


def _ppo(part: Report) -> str:
    rows = [
        [
            name,
            *(_seconds(of["seconds"][beat]) for beat in BEATS),
            f"{of['rollout_tokens_per_second']:.0f}",
            f"{of['update_tokens_per_second']:.0f}",
            f"{of['peak_gb']['median']:.2f}",
        ]
        for name, of in sorted(part.items(), key=lambda item: (not item[0].startswith(OURS), item[0]))
    ]
    heads = ["PPO", *(f"{beat}, s" for beat in BEATS), "rollout tokens/s", "update tokens/s", "peak memory, GB"]
    return _table(heads, rows)


def _rates(part: Report) -> str:
    floor = part["floor_seconds"]
    return (
        f"The floor of this work on this machine, from {part['flops'] / 1e12:.2f} TFLOP/s (bfloat16) and {part['bandwidth'] / 1e9:.0f} GB/s, "
        "both measured in the same run, with one scoring pass: "
        + ", ".join(f"{beat} {floor[beat]:.2f} s" for beat in BEATS)
        + "."
    )


def _rollout(part: Report) -> str:
    kinds = list(next(iter(part.values())))
    rows = [[name, *(_range(of[kind], ".0f") for kind in kinds)] for name, of in sorted(part.items())]
    return _table(["rollout, tokens/s", *(f"{kind} lengths" for kind in kinds)], rows)


def _sft(part: Report) -> str:
    rows = [
        [
            name,
            _seconds(of["seconds"]),
            f"{of['peak_gb']['median']:.2f}",
            f"{of['above_imports_gb']['median']:.2f}",
        ]
        for name, of in sorted(part.items())
    ]
    return _table(["SFT", "step, s", "peak memory, GB", "above the libraries, GB"], rows)


def _steps(part: Report) -> str:
    after = sorted(part["after"].items(), key=lambda item: int(item[0]))
    rows = [[step, f"{of['peak_gb']:.3f}", f"{of['held_gb']:.3f}"] for step, of in after]
    return _table(["after iteration", "peak memory, GB", "held, GB"], rows)


def _growth(part: Report) -> str:
    rows = [
        [name, *(f"{part[name]['seconds'][beat]['median']:.2f}" for beat in BEATS), f"{part[name]['peak_gb']:.2f}"]
        for name in growing()
        if name in part
    ]
    return _table(["a PPO iteration of", *(f"{beat}, s" for beat in BEATS), "peak memory, GB"], rows)


_TABLES = {
    "ppo": _ppo,
    "rates": _rates,
    "rollout": _rollout,
    "sft": _sft,
    "steps": _steps,
    "growth": _growth,
}


def _seconds(of: dict[str, float]) -> str:
    return _range(of, ".2f")


def _range(of: dict[str, float], form: str) -> str:
    return f"{of['median']:{form}} ({of['low']:{form}} to {of['high']:{form}})"


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Rewrites the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_block(page, block(read_report())), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'no run yet' if read_report() is None else 'tables rewritten'}")


if __name__ == "__main__":
    main()
