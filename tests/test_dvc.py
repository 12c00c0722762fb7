"""What DVC itself does with side effects, asked of a project of a few lines; and that our stages never ask DVC."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_layout import MODULES

# Each run of a stage leaves a line in log, outside of what DVC knows.
STAGE = """
import os, sys
from pathlib import Path
name, log = sys.argv[1:]
Path(name).write_text(Path("params.yaml").read_text())
with open(log, "a") as stream:
    stream.write(f"{name} {os.environ['DVC_ROOT']} {Path.cwd()}\\n")
"""
PROJECT = """
stages:
  metric: {{cmd: {python} stage.py metric {log}, params: [x], metrics: [metric: {{cache: false}}]}}
  plain: {{cmd: {python} stage.py plain {log}, params: [x], outs: [plain]}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "stage.py").write_text(STAGE)
    (folder / "dvc.yaml").write_text(PROJECT.format(python=sys.executable, log=folder / "log"))
    (folder / "params.yaml").write_text("x: 1\n")
    (folder / ".gitignore").write_text("log\n")
    run(folder, "git", "init", "-q")
    dvc(folder, "init", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start")
    return folder


def run(folder: Path, *words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def dvc(folder: Path, *words: str) -> None:
    run(folder, sys.executable, "-m", "dvc", *words)


def ran(folder: Path) -> list[list[str]]:
    """[stage, DVC_ROOT, working folder] of each run, in order."""
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def test_dvc_restores_a_stage_that_it_has_run_before_unless_told_not_to(project: Path) -> None:
    """Report iterative/dvc#4551: a restored stage runs nothing, so MLflow does not hear of it, be its metrics in the cache or not.

    That is accepted: MLflow has the run that made these bytes, and whatever uses them is linked to it by their hash
    (test_tracking.py). `--no-run-cache` runs them again, under a run of their own.
    """

    def runs_after(x: int, *options: str) -> list[str]:
        (project / "params.yaml").write_text(f"x: {x}\n")
        dvc(project, "repro", "-q", *options)
        return sorted(name for name, _, _ in ran(project))

    assert runs_after(1) == ["metric", "plain"]
    assert runs_after(2) == ["metric"] * 2 + ["plain"] * 2
    assert runs_after(1) == ["metric"] * 2 + ["plain"] * 2
    assert (project / "plain").read_text() == (project / "metric").read_text() == "x: 1\n"
    runs_after(2)
    assert runs_after(1, "--no-run-cache") == ["metric"] * 3 + ["plain"] * 3


def test_an_experiment_in_a_copy_knows_the_main_checkout(project: Path) -> None:
    """So that its figures, and checkpoints, do not vanish with the copy."""
    (project / "params.yaml").write_text("x: 3\n")
    dvc(project, "exp", "run", "-q", "--temp", "-S", "x=4")
    for _, root, folder in ran(project)[-2:]:
        assert root == str(project) and folder != root
        assert not Path(folder).exists()


def test_stages_never_call_dvc() -> None:
    """Report iterative/dvc#9723: a stage that asks DVC for parameters meets the lock of the DVC that runs it."""
    for file in MODULES:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "dvc" for name in names), file
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
                first = node.args[0].elts[:1]
                assert not any(isinstance(word, ast.Constant) and word.value == "dvc" for word in first), file
