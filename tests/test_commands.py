"""Every command in the documentation is run by a test, or stands in tests/command_table.py with the reason why not."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from command_table import NOT_RUN, SESSIONS, TESTED, Run
from commands import COMMENT, commands_of, documented, stretches
from conftest import ROOT
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from test_end_to_end import ENVIRONMENT, clone_to

PERSON = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
QUIETLY = PERSON | {"DVC_NO_ANALYTICS": "1"}
LIMIT = 600  # seconds for one command; the slowest takes about a minute
PAGE = """Prose with `make a B=c` and `make` and `a.py b`, one `dvc exp
run` over two lines.

    dvc repro                # comment
    made up --by nobody

    runtime:
      launch: ddp

```sh
FOO=1 anything \\
    --goes   # comment
```

```
make printed output
```
"""


def shell(folder: Path, line: str, before: str = "true") -> subprocess.CompletedProcess[str]:
    """What a person types, in bash; a pipe fails where any part of it does."""
    words = ["bash", "-e", "-o", "pipefail", "-c", f"{before}\n{line}"]
    return subprocess.run(
        words, cwd=folder, env=ENVIRONMENT | QUIETLY, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip


def in_order(ran: subprocess.CompletedProcess[str], line: str) -> str:
    """What it printed, where it ended well."""
    assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr


def with_environment(folder: Path) -> Path:
    """The environment of these tests as the clone's own .venv, newer than the lock files, so that make makes none."""
    environment = folder / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".complete":
            (environment / entry.name).symlink_to(entry)
    (environment / ".complete").touch()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A clone on the smoke recipe after `make repro`, all committed, and what that printed.

    Without a plan of memory, which takes each stage longer than its training does.
    """
    folder = tmp_path_factory.mktemp("made") / "clone"
    folder.mkdir()
    with_environment(clone_to(folder))
    params = folder / "params.yaml"
    params.write_text(
        params.read_text(encoding="utf-8").replace("check_memory: true", "check_memory: false"), encoding="utf-8"
    )
    printed = in_order(shell(folder, "make repro"), "make repro")
    in_order(shell(folder, "git add --all && git commit -qm result"), "git commit")
    return folder, printed


def test_commands_are_found_in_prose_and_blocks_and_nowhere_else() -> None:
    assert list(commands_of(PAGE)) == [
        *("make a B=c", "dvc exp run", "dvc repro", "made up --by nobody", "FOO=1 anything --goes"),
    ]  # fmt: skip


def test_every_documented_command_is_in_the_table_and_the_table_has_no_other() -> None:
    rows = Counter([run.command for session in SESSIONS.values() for run in session])
    rows.update([*TESTED, *(row.command for row in NOT_RUN)])
    assert [command for command, count in rows.items() if count > 1] == []
    named = documented()
    assert {command: page for command, page in named.items() if command not in rows} == {}
    assert set(rows) - set(named) == set()


@pytest.mark.parametrize("place", sorted(set(TESTED.values())))
def test_the_test_that_is_said_to_run_a_command_exists(place: str) -> None:
    file, _, name = place.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_make_repro_ends_with_the_table_and_the_report(made: tuple[Path, str]) -> None:
    folder, printed = made
    assert printed.count("Running stage") == 6
    assert "Answers to the held-out prompts" in printed
    assert (folder / "reports/index.html").is_file()


@pytest.mark.parametrize("instead", sorted({row.instead for row in NOT_RUN} - {"true"}))
def test_what_cannot_be_run_is_at_least_there(made: tuple[Path, str], instead: str) -> None:
    in_order(shell(made[0], instead), instead)


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_commands_do_what_the_documentation_says(made: tuple[Path, str], session: list[Run]) -> None:
    folder, _ = made
    for program in filter(None, (run.needs for run in session)):
        if shell(folder, f"command -v {program}").returncode:
            pytest.skip(f"{program} is not on this machine")
    # whatever another session has left
    in_order(
        shell(folder, "git reset -q --hard && git clean -qfd && dvc checkout -q --force --allow-missing"),
        "dvc checkout",
    )
    for run in session:
        printed = in_order(shell(folder, run.line, run.before), run.line)
        assert run.says in printed, f"{run.line}\n{printed}"


def test_mlflow_understands_the_filters_of_the_documentation(made: tuple[Path, str]) -> None:
    folder, _ = made
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    (block,) = (text for kind, text in stretches(page) if kind == "indented" and text.lstrip().startswith("tags."))
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("solo-rlhf").experiment_id
    for line in block.splitlines():
        client.search_runs([experiment], COMMENT.sub("", line).strip())  # what it does not understand it refuses
    with pytest.raises(MlflowException):
        client.search_runs([experiment], "tags.health ~ 'kl-spike'")
