"""compose.yaml and deploy/, by the validators of those whose formats they are, from an environment of their own (make test-container)."""

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from ruamel.yaml import YAML

BIN = ROOT / ".venv-validators" / "bin"
pytestmark = pytest.mark.skipif(not BIN.is_dir(), reason="no .venv-validators: `make test-container` makes it")
# What `sky` does with a file before it asks any cloud.
LOAD = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(sorted(task.envs), next(iter(task.resources)).use_spot)"


def validated(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)


def damaged(tmp_path: Path, file: str, right: str, wrong: str) -> Path:
    """The file with a fault in it: a validator that takes that too says nothing."""
    text = (ROOT / file).read_text()
    assert right in text
    (tmp_path / "file.yaml").write_text(text.replace(right, wrong))
    return tmp_path / "file.yaml"


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_obey_the_compose_specification(tmp_path: Path, file: str) -> None:
    check = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = validated(*check, file)
    assert done.returncode == 0, done.stdout
    assert validated(*check, damaged(tmp_path, file, "shm_size", "shm_sise")).returncode == 1


def test_the_kubernetes_job_obeys_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    done = validated("kubernetes-validate", "--strict", "deploy/kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = damaged(tmp_path, "deploy/kubernetes.yaml", "restartPolicy", "restartPolice")
    assert validated("kubernetes-validate", "--strict", wrong).returncode != 0


def test_skypilot_loads_the_task(tmp_path: Path) -> None:
    done = validated("python", "-c", LOAD, "deploy/skypilot.yaml")
    assert done.returncode == 0 and done.stdout.endswith("True\n"), done.stdout + done.stderr
    wrong = damaged(tmp_path, "deploy/skypilot.yaml", "use_spot", "use_spott")
    assert validated("python", "-c", LOAD, wrong).returncode != 0


def test_the_jobs_name_files_and_a_time_that_are_right() -> None:
    """Kubernetes: one GPU, a volume, shared memory, and as long to end as compose.yaml gives."""
    _, job = YAML(typ="safe").load_all(ROOT / "deploy/kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (stage,) = pod["containers"]
    assert stage["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["terminationGracePeriodSeconds"] == 300
    compose = YAML(typ="safe").load(ROOT / "compose.yaml")
    assert compose["services"]["pipeline"]["stop_grace_period"] == "5m"
    inside = {volume.split(":")[1] for volume in compose["services"]["pipeline"]["volumes"]}
    assert inside | {"/tmp", "/dev/shm"} == {mount["mountPath"] for mount in stage["volumeMounts"]}
