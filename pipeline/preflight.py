"""What `make repro` asks before DVC starts: is another DVC at work here, are the parameters sound, are the data and the user's reward functions there?

DVC's own answers say no remedy.
"""

import json
import sys
from pathlib import Path

import psutil

from pipeline.data.sources import find_data
from pipeline.errors import BaseModelError, NoRoomError, UserError
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.params.ppo import PPOParams
from pipeline.params.section import load_section
from pipeline.planning.bases import configuration
from pipeline.planning.fitting import refuse_misfit
from pipeline.planning.settings import Settings, this_machine
from pipeline.planning.stages import plan_stage
from pipeline.progress import console
from pipeline.rewards import find_functions
from pipeline.stage import quiet_libraries

RWLOCK = Path(".dvc/tmp/rwlock")  # which process reads and writes what, as DVC notes it


def refuse_second_dvc(rwlock: Path = RWLOCK) -> None:
    """Two runs of one chain would write the same outputs.

    Raises:
        UserError: a DVC is at work here; or one that is gone has left its mark, and its number belongs to another process.
    """
    if not rwlock.is_file():
        return
    try:
        writers = json.loads(rwlock.read_text(encoding="utf-8")).get("write", {}).values()
    except ValueError:
        raise UserError(f"{rwlock} is damaged, as after a crash: remove it, if no dvc is running here.") from None
    for pid in sorted({writer["pid"] for writer in writers}):
        if not psutil.pid_exists(pid):
            continue  # DVC itself takes that for what it is
        command = " ".join(psutil.Process(pid).cmdline())
        if "dvc" in command:
            raise UserError(
                f"dvc is at work here already, as process {pid}; wait for its end, or stop it with `kill {pid}`: the next "
                "`make repro` goes on where it was."
            )
        raise UserError(
            f"{rwlock} says that process {pid} is a dvc at work here, but it is {command!r}: a dvc that was killed has left "
            f"it, and DVC would wait for ever; remove {rwlock}."
        )


def check_memory() -> None:
    """That each stage can fit; where the base is not on this machine yet, its stages look themselves.

    Raises:
        NoRoomError: the first one that cannot.
    """
    settings = Settings.read()
    if not settings.runtime.check_memory:
        return
    try:
        config = configuration(settings.base.model, settings.base.trust_remote_code)
    except BaseModelError:
        return
    for stage in ("sft", "reward", "ppo", "evaluate"):
        machine = this_machine(settings.runtime)
        try:
            refuse_misfit(plan_stage(stage, settings, config, machine), settings, config, machine)
        except NoRoomError as error:
            raise NoRoomError(f"{stage}: {error}") from None


def find_inputs() -> None:
    """The data, and the user's reward functions.

    Raises:
        UserError: one is not there.
    """
    for kind, path in load_section("data", DataParams).sources.items():
        find_data(f"data.{kind}", path)
    find_functions(load_section("ppo", PPOParams).reward)


def main() -> None:
    """Exit status 1, and one line, where something is wrong."""
    quiet_libraries()
    try:
        refuse_second_dvc()
        check_params()
        find_inputs()
        check_memory()
    except UserError as error:
        console.print(str(error), markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
