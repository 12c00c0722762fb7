"""Git, DVC, and what the parameters ask for."""

import shutil
import subprocess  # nosec B404
from collections.abc import Callable, Iterator
from pathlib import Path

from ruamel.yaml import YAML, YAMLError

from pipeline.doctor.findings import Finding
from pipeline.errors import UserError

DVC_LOCKS = (Path("dvc.lock"), Path("alternatives/dvc.lock"))


def look_at_git() -> Iterator[Finding]:
    """A repository with a commit: DVC's experiments stand on one."""
    if shutil.which("git") is None:
        yield Finding("git", "fix", "not installed", "install git: DVC needs it")
        return
    error = _git("rev-parse", "--verify", "HEAD")[1]
    if "dubious ownership" in error:
        yield Finding(
            "git", "fix", "the checkout belongs to another user", 'git config --global --add safe.directory "$PWD"'
        )
        return
    if "not a git repository" in error:
        yield Finding(
            "git", "fix", "this is no git repository", "git clone it, instead of copying the files: DVC needs one"
        )
        return
    if error:
        yield Finding("git", "fix", "there is no commit yet", 'git add --all && git commit -m "first"')
        return
    if not _git("config", "user.email")[0]:
        yield Finding("git", "note", "no user.email: no commit can be made", "git config user.email you@example.com")
    changed = len(_git("status", "--porcelain")[0].splitlines())
    if changed:
        yield Finding(
            "git",
            "note",
            f"{changed} files differ from the last commit",
            "commit: an experiment wants a commit to stand on",
        )
    else:
        yield Finding("git", "ok", f"at {_git('rev-parse', '--short', 'HEAD')[0]}, nothing uncommitted")


def _git(*words: str) -> tuple[str, str]:
    """What git says, and what it says is wrong."""
    answer = subprocess.run(["git", *words], capture_output=True, text=True, check=False)  # nosec B603 B607
    return answer.stdout.strip(), answer.stderr.strip() if answer.returncode else ""


def look_at_dvc(refuse_second: Callable[[], None], locks: tuple[Path, ...] = DVC_LOCKS) -> Iterator[Finding]:
    """Whether another DVC is at work, and whether the lock files can be read.

    refuse_second: raises UserError where one is.
    """
    try:
        refuse_second()
    except UserError as error:
        yield Finding("DVC", "fix", str(error))
        return
    for lock in filter(Path.exists, locks):
        try:
            YAML(typ="safe").load(lock)
        except YAMLError:
            text = f"{lock} cannot be read, as after a merge"
            yield Finding("DVC", "fix", text, f"git checkout HEAD -- {lock}, then dvc repro writes it anew")
            return
    yield Finding("DVC", "ok", "no other at work here, lock files can be read")


def look_at(subject: str, check: Callable[[], str]) -> Iterator[Finding]:
    """Something that says in its own words what is wrong.

    check: what is so; raises UserError where it is not as it should be.
    """
    try:
        yield Finding(subject, "ok", check())
    except UserError as error:
        yield Finding(subject, "fix", str(error))
