"""`make health`: what the rules find in the last run, read again from plots/ and metrics/."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import UserError
from pipeline.health.curve import read_curve
from pipeline.health.findings import Finding
from pipeline.health.report import CLEAN, findings_table
from pipeline.health.rules import STEP_RULES, find_in_curve, find_in_result
from pipeline.lineage import flattened
from pipeline.params.section import read_params
from pipeline.progress import console


def findings_of_run(folder: Path, params: Mapping[str, str]) -> tuple[dict[str, list[Finding]], dict[str, int]]:
    """By stage that has run: its findings, and the number of its steps."""
    found: dict[str, list[Finding]] = {}
    steps: dict[str, int] = {}
    for stage in STEP_RULES:
        plot, metrics = folder / f"plots/{stage}.tsv", folder / f"metrics/{stage}.json"
        if plot.is_file():
            curve = read_curve(plot)
            steps[stage] = len(curve)
            found[stage] = find_in_curve(stage, curve, params)
        if plot.is_file() and metrics.is_file():
            result = json.loads(metrics.read_text(encoding="utf-8"))
            found[stage] += find_in_result(stage, result, steps[stage], params)
    return found, steps


def main() -> None:
    """Prints the findings as a table, and what was looked at."""
    try:
        params = dict(flattened(read_params()))
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)
    found, steps = findings_of_run(Path(), params)
    if not steps:
        console.print("There is no curve in plots/ yet; run `make repro`.", markup=False)
        sys.exit(1)
    if any(found.values()):
        console.print(findings_table(found), soft_wrap=False)
    looked = ", ".join(f"{stage} ({count} steps)" for stage, count in steps.items())
    clean = [stage for stage, findings in found.items() if not findings]
    console.print(f"Looked at {looked}.", f"{CLEAN.capitalize()} in {', '.join(clean)}." if clean else "", markup=False)


if __name__ == "__main__":
    main()
