"""`make diagnose`: why does my run not learn? Is it the code, a setting, or the reward model?

Reads params.yaml, prepared/ and artifacts/; writes nothing. Exit status 0: nothing deviates; 1: it cannot be run; 2: bad
settings or reward model; 3: faulty code.
"""

import sys
import time
from pathlib import Path

from rich import box
from rich.table import Table

from pipeline.data.prepared import read_pairs
from pipeline.diagnosis.compare import Beat
from pipeline.diagnosis.ladder import Budget, Rung, climb, rungs
from pipeline.diagnosis.opening import open_case
from pipeline.diagnosis.verdict import Verdict, judge
from pipeline.errors import DataError, UserError
from pipeline.params.check import check_params
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.ppo import PPOParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section, parse_seed, read_params
from pipeline.progress import ProgressBar, console
from pipeline.randomness import derive_seed, prepare_torch
from pipeline.stage import BASE_FILE, Stage, quiet_libraries
from pipeline.tracking.tracker import Tracker

WIDTH = 80
STYLES = {"ok": "green", "unclear": "yellow", "setting": "yellow", "reward model": "yellow", "CODE": "bold red"}


def diagnose(budget: Budget) -> Verdict:
    """Climbs the ladder, prints it, and says what it means.

    Raises:
        UserError: a stage before ppo has not run, or the parameters are not sound.
    """
    started = time.monotonic()
    warnings = check_params()
    refuse_without_artifacts()
    runtime = load_section("runtime", RuntimeParams)
    seed = derive_seed(parse_seed(read_params()), "ppo")
    prepare_torch(seed, runtime)
    stage = Stage("ppo", seed, runtime, Tracker())  # a tracker without a run: nothing reaches MLflow
    case = open_case(stage)
    pairs = read_pairs(stage.input("prepared/development.jsonl"))
    total = 1 + 3 * budget.iterations + budget.still_iterations
    with ProgressBar("diagnose", total, line_every=budget.iterations) as bar:
        found = climb(case, pairs, budget, bar)
    verdict = judge(found, load_section("evaluate", EvaluateParams), warnings)
    console.print(beats_table(found.beats), rungs_table(rungs(found)), width=WIDTH)
    console.print(f"\n{verdict.headline}", style="bold", markup=False, width=WIDTH, soft_wrap=False)
    for number, step in enumerate(verdict.next_steps, start=1):
        console.print(f"{number}. {step}", markup=False, width=WIDTH, soft_wrap=False)
    for note in verdict.notes:
        console.print(f"Note: {note}", markup=False, width=WIDTH, soft_wrap=False)
    console.print(f"({time.monotonic() - started:.0f} s)", markup=False)
    return verdict


def refuse_without_artifacts() -> None:
    """Says at once all that is not there.

    Raises:
        DataError: the stages before ppo have not run.
    """
    cfg = load_section("ppo", PPOParams)
    needed = [str(BASE_FILE), "prepared/ppo.jsonl", "prepared/development.jsonl", "artifacts/sft"]
    needed += ["artifacts/reward"] if cfg.uses_reward_model else []
    missing = [path for path in needed if not Path(path).exists()]
    if missing:
        raise DataError(
            f"the loop is run on your own artifacts, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            f"there; run `dvc repro {'reward' if cfg.uses_reward_model else 'sft'}` first, which makes what is needed."
        )


def beats_table(beats: list[Beat]) -> Table:
    """Every beat and how far it is from its second computation."""
    table = Table(
        "beat", "found", "", title="1  Each beat computed a second time", title_justify="left", box=box.SIMPLE_HEAD
    )
    for beat in beats:
        word = "DEVIATES" if beat.deviates else "ok"
        table.add_row(beat.name, beat.found, word, style="bold red" if beat.deviates else None)
    return table


def rungs_table(lines: list[Rung]) -> Table:
    """The ladder."""
    table = Table("rung", "done", "found", "verdict", title="The ladder", title_justify="left", box=box.SIMPLE_HEAD)
    for line in lines:
        table.add_row(line.name, line.done, line.found, f"[{STYLES.get(line.word, 'dim')}]{line.word}[/]")
    return table


def main() -> None:
    """No arguments."""
    quiet_libraries()
    try:
        verdict = diagnose(Budget())
    except UserError as error:
        console.print(f"diagnose: {error}", markup=False, style="red")
        sys.exit(1)
    sys.exit(verdict.status)


if __name__ == "__main__":
    main()
