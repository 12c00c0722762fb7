"""Ours against the peer, side by side: `make bench`, or

    python -m benchmarks.bench                     # everything, half an hour on two cores, alone on the machine
    python -m benchmarks.bench --only rollout      # one part; also ppo, sft, steps, growth, rates
    python -m benchmarks.bench --quick             # one repetition: does it run?

Each measurement is a fresh process, ours and the peer's in turn. A whole run writes benchmarks/results/peer.json, anything less
partial.json beside it; `python -m benchmarks.render` puts the tables into docs/performance.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.plan import OURS, PART_NAMES, PEER, Part, parts
from benchmarks.probe import ROOT, Figures, ProbeError, measure
from benchmarks.render import markdown
from benchmarks.setting import RUNTIME, our_setting
from benchmarks.work import Work
from pipeline.files import write_json

REPETITIONS = 3
PEER_ENVIRONMENT = ROOT / ".venv-peer"
REQUIREMENTS = ROOT / "benchmarks/peer/requirements.txt"
RESULTS = ROOT / "benchmarks/results"


def pythons() -> dict[str, Path]:
    """The interpreter of each side; the peer's environment is made the first time."""
    complete = PEER_ENVIRONMENT / ".complete"
    python = PEER_ENVIRONMENT / "bin/python"
    if not complete.exists() or complete.stat().st_mtime < REQUIREMENTS.stat().st_mtime:
        print("Making .venv-peer and installing the peer into it, once (a few minutes).", flush=True)
        subprocess.run([sys.executable, "-m", "venv", PEER_ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", REQUIREMENTS], check=True)
        complete.touch()
    return {OURS: Path(sys.executable), PEER: python}


def run_part(part: Part, repetitions: int, interpreters: dict[str, Path]) -> results.Runs:
    """What each probe answered, in each of its runs."""
    runs: results.Runs = defaultdict(list)
    for repetition in range(repetitions if part.repeated else 1):
        for probe in part.probes:
            started = time.monotonic()
            runs[probe.name].append(measure(interpreters[probe.side], probe.module, probe.request))
            print(f"{part.name} {repetition + 1}: {probe.name}, {time.monotonic() - started:.0f} s", flush=True)
    return dict(runs)


def summarize(part: Part, runs: results.Runs, work: Work, model: Path) -> results.Summary:
    """A part's medians and spreads."""
    match part.name:
        case "rates":
            return results.summarize_rates(runs, work, json.loads((model / "config.json").read_text(encoding="utf-8")))
        case "ppo":
            return results.summarize_ppo(runs, work)
        case "rollout":
            return results.summarize_rollout(runs, part.probes[0].request["lengths"])
        case "sft":
            return results.summarize_sft(runs)
        case "steps":
            return results.summarize_steps(runs)
        case "growth":
            return results.summarize_growth(runs)
    raise AssertionError(part.name)


def versions_in(runs: results.Runs, part: Part) -> dict[str, dict[str, str]]:
    """Side -> package -> version, as the processes themselves saw them."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for probe in part.probes:
        found[probe.side] |= runs[probe.name][0]["versions"]
    return dict(found)


def main() -> None:
    """Measures, writes, prints; exit status 1 where nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=PART_NAMES, help="measure this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--busy", action="store_true", help="measure although the machine is not quiet")
    asked = parser.parse_args()
    before = machine.load()
    if (refusal := machine.refusal(before[0])) and not asked.busy:
        sys.exit(refusal)
    repetitions = 1 if asked.quick else REPETITIONS
    whole = not (asked.quick or asked.only)
    file = RESULTS / ("peer.json" if whole else "partial.json")
    try:
        report = run(Work(), repetitions, asked.only or PART_NAMES, before, RESULTS / "partial.json")
    except ProbeError as error:
        sys.exit(str(error))
    write_json(file, report)
    print(markdown(report))
    print(f"Written to {file.relative_to(ROOT)}.")


def run(
    work: Work, repetitions: int, names: tuple[str, ...] | list[str], before: list[float], scratch: Path
) -> Figures:
    """The report, written to `scratch` after each part, so that a run that is cut short is not lost."""
    interpreters = pythons()
    model = Path(measure(interpreters[OURS], "benchmarks.ours.model", {})["folder"])
    report: dict[str, Any] = {
        "machine": machine.describe(),
        "load": {"before": before},
        "work": asdict(work),
        "repetitions": repetitions,
        "runtime": RUNTIME,
        "setting": our_setting(work).stated(),
        "versions": {},
        "parts": {},
        "targets": {},
    }
    started = machine.Moment.now()
    for part in (part for part in parts(work, str(model)) if part.name in names):
        runs = run_part(part, repetitions, interpreters)
        report["parts"][part.name] = summarize(part, runs, work, model)
        for side, versions in versions_in(runs, part).items():
            report["versions"].setdefault(side, {}).update(versions)
        report["targets"] = results.judged(report["parts"])
        for name in ("time_ratio", "memory_ratio"):
            if name in report["targets"]:
                report[name] = report["targets"][name]["value"]
        now = machine.Moment.now()
        report["minutes"] = (now.clock - started.clock) / 60
        report["load"] |= {
            "after": machine.load(),
            "others_share": started.others_share(now, report["machine"]["cores"]),
        }
        write_json(scratch, report)
    return report


if __name__ == "__main__":
    main()
