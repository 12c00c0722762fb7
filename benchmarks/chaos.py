"""Is anything lost when a run is killed again and again? The smoke recipe, killed at random moments, against an undisturbed run.

It trains longer than it does by itself: a part of a second would hardly ever be hit.

    python -m benchmarks.chaos --kills 20 --signal KILL
    python -m benchmarks.chaos --kills 20 --signal TERM

Each kill hits one of the stages that train, at a moment drawn from the time that it takes: the stage's process alone, DVC's
alone, or the whole process group. Then `dvc repro` is started again. At the end all outputs must have the hashes of an
undisturbed run, and MLflow one run per stage, in which each metric has each step once.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
STAGES = ("sft", "reward", "judge", "ppo")
TARGETS = ("stage", "dvc", "group")
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "COLUMNS": "200",
    "DVC_NO_ANALYTICS": "1",
}
LONGER = {"sft": {"epochs": 8}, "reward": {"epochs": 8}, "judge": {"epochs": 8}, "ppo": {"iterations": 15}}
IDENTITY = ("-c", "user.name=chaos", "-c", "user.email=chaos@localhost")


@dataclass(frozen=True)
class Kill:
    """One kill, and what the next run said of it.

    after: seconds from the moment at which the stage had its lock.
    went_on: the place from which the stage was taken up.
    """

    stage: str
    target: str
    after: float
    went_on: str


def clone_to(folder: Path) -> Path:
    """The working tree as it is, as a repository of its own on the smoke recipe."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.endswith("dvc.lock") and not name.startswith(("metrics/", "plots/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    yaml = YAML()
    params = yaml.load(ROOT / "recipes/smoke.yaml")
    for section, changes in LONGER.items():
        params[section] |= changes
    yaml.dump(params, folder / "params.yaml")
    for words in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "start"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


class Chain:
    """`dvc repro` in a clone, in a process group of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / f"chaos_{time.monotonic_ns()}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                ["dvc", "repro"], cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def printed(self) -> str:
        """All lines so far."""
        return self.log.read_text()

    def working_stage(self) -> tuple[str, int] | None:
        """The training stage that is at work, and its process."""
        for stage in STAGES:
            file = self.folder / ".work" / stage / "pid"
            if file.exists() and (text := file.read_text()) and alive(int(text)):
                return stage, int(text)
        return None

    def send(self, number: signal.Signals, target: str, stage_pid: int) -> None:
        """A signal, and the end of all that it should end."""
        if target == "stage":
            os.kill(stage_pid, number)
        elif target == "dvc":
            self.process.send_signal(number)
        else:
            os.killpg(self.process.pid, number)
        self.process.wait()
        while alive(stage_pid):
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a stage of this project is that process."""
    try:
        return "stages." in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def lengths(chain: Chain) -> dict[str, float]:
    """Follows an undisturbed run: the seconds from each stage's lock to its end."""
    times: dict[str, list[float]] = {}
    while chain.process.poll() is None:
        if working := chain.working_stage():
            times.setdefault(working[0], []).append(time.monotonic())
        time.sleep(0.01)
    if chain.process.returncode:
        raise SystemExit(chain.printed)
    return {stage: seen[-1] - seen[0] for stage, seen in times.items()}


def disturbed(
    folder: Path, kills: int, number: signal.Signals, seconds: dict[str, float], rng: random.Random
) -> list[Kill]:
    """Runs the chain to its end with so many kills on the way, about as many in each stage, at moments all over its time."""
    done: list[Kill] = []
    last: tuple[str, str, float] | None = None  # a kill of which the next run has yet to say something
    while True:
        chain = Chain(folder)
        hit = None
        if len(done) + (last is not None) < kills:
            hit = kill_once(
                chain, number, seconds, rng, [kill.stage for kill in done] + ([last[0]] if last else []), kills
            )
        chain.process.wait()
        if chain.process.returncode and hit is None:
            raise SystemExit(f"dvc repro failed although nothing was killed:\n{chain.printed}")
        if last is not None:
            done.append(Kill(*last, went_on(chain.printed, last[0])))
        if hit is None and len(done) >= kills:
            return done
        if hit is None:  # the chain came to its end before all kills: once more from its first stage
            forget(folder)
        last = hit


def forget(folder: Path) -> None:
    """DVC no longer knows that anything has run, so that it runs every stage again and restores none."""
    (folder / "dvc.lock").unlink()
    shutil.rmtree(folder / ".dvc/cache/runs")


def kill_once(
    chain: Chain,
    number: signal.Signals,
    seconds: dict[str, float],
    rng: random.Random,
    had: list[str],
    kills: int,
) -> tuple[str, str, float] | None:
    """One kill: stage, target, and seconds after the lock; None where the chain came to its end first."""
    missed: set[int] = set()  # processes that had ended before their moment came
    while chain.process.poll() is None:
        time.sleep(0.01)
        working = chain.working_stage()
        if working is None or working[1] in missed or quota_used(had, working[0], kills):
            continue
        stage, pid = working
        delay = rng.uniform(0, seconds[stage])
        time.sleep(delay)
        if alive(pid):
            target = rng.choice(TARGETS)
            chain.send(number, target, pid)
            print(f"{len(had) + 1:2d}. {stage}, {target}, after {delay:.1f} s", flush=True)
            return stage, target, delay
        missed.add(pid)
    return None


def quota_used(had: list[str], stage: str, kills: int) -> bool:
    """Whether the stage has had its share, so that the others get theirs."""
    return had.count(stage) >= -(-kills // len(STAGES))


def went_on(printed: str, stage: str) -> str:
    """From which place a run took the stage up."""
    if found := re.search(rf"^{stage}: goes on after (.*), from ", printed, re.M):
        return found[1]
    begun = re.search(rf"^{stage}: weights that are trained", printed, re.M)
    return "its start" if begun else "killed again before it could"


def output_hashes(folder: Path) -> dict[str, str]:
    """Path -> hash of every output, as dvc.lock has them."""
    lock = YAML(typ="safe").load(folder / "dvc.lock")
    return {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage["outs"]}


def faults_in_mlflow(folder: Path) -> list[str]:
    """What is not as if nothing had happened: runs that did not finish, steps that a metric has twice or not at all."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("solo-rlhf").experiment_id
    faults = []
    for run in client.search_runs([experiment]):
        name = run.info.run_name
        if run.info.status != "FINISHED":
            faults.append(f"{name} is {run.info.status}")
        table = folder / f"plots/{name}.tsv"
        if name not in STAGES:
            continue
        rows = [line.split("\t") for line in table.read_text().splitlines()]
        for column, metric in enumerate(rows[0][1:], start=1):
            told = sorted(found.step for found in client.get_metric_history(run.info.run_id, metric))
            expected = [int(row[0]) for row in rows[1:] if row[column]]
            if told != expected:
                faults.append(f"{name} has {metric} at steps {told}, not {expected}")
    return faults


def table(kills: list[Kill]) -> str:
    """Markdown."""
    lines = [
        "| kill | stage | sent to | seconds after its start | the next run went on after |",
        "|---|---|---|---|---|",
    ]
    for index, kill in enumerate(kills, start=1):
        lines.append(f"| {index} | {kill.stage} | {kill.target} | {kill.after:.1f} | {kill.went_on} |")
    return "\n".join(lines)


def main() -> None:
    """Exit status 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=["KILL", "TERM"], default="KILL")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    number = signal.Signals[f"SIG{asked.signal}"]
    with tempfile.TemporaryDirectory() as place:
        calm, wild = (clone_to(Path(place) / name) for name in ("calm", "wild"))
        seconds = lengths(Chain(calm))
        started = time.monotonic()
        kills = disturbed(wild, asked.kills, number, seconds, random.Random(asked.seed))
        expected, found = output_hashes(calm), output_hashes(wild)
        lost = [path for path in expected if found.get(path) != expected[path]]
        faults = faults_in_mlflow(wild)
    print(table(kills))
    print(f"\n{len(kills)} kills by {number.name} in {time.monotonic() - started:.0f} s, "
          f"{sum(kill.went_on.startswith(('step', 'iteration')) for kill in kills)} taken up from a checkpoint.")  # fmt: skip
    print(f"Outputs with the hash of the undisturbed run: {len(expected) - len(lost)} of {len(expected)} {lost or ''}")
    print(f"Faults in MLflow: {len(faults)} {faults or ''}")
    sys.exit(bool(lost or faults))


if __name__ == "__main__":
    main()
