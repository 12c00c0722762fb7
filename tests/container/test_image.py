"""The image, built from the Dockerfile, and the smoke pipeline in it as a user that nobody knows."""

import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from builder import BASE, UID, Container, build, buildah, config, container, init_of, why_not
from conftest import ROOT
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML
from test_end_to_end import ARTIFACTS, clone_to, run, stages_run

from pipeline.files import hash_path

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no image can be built here: {why_not()}")
COMPOSE = YAML(typ="safe").load(ROOT / "compose.yaml")["services"]
LONGER = "iterations: 15"  # of PPO: time enough to be stopped in


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A container of the image, which is built once; all but the base is removed again."""
    try:
        build(tmp_path_factory.mktemp("build"))
        yield container()
    finally:
        buildah("rm", "--all")
        for name in buildah("images", "--all", "--quiet", "--no-trunc").split():
            if name != buildah("images", "--quiet", "--no-trunc", BASE):
                buildah("rmi", "--force", name)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which the smoke pipeline has run, without a container."""
    folder = clone_to(tmp_path_factory.mktemp("outside"))
    done = run(folder, "dvc", "repro")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def inside(image: Container, tmp_path_factory: pytest.TempPathFactory) -> Container:
    """With a clone in which nothing has run."""
    return image.mounting(clone_to(tmp_path_factory.mktemp("inside")))


def clone_of(inside: Container) -> Path:
    return next(folder for folder, at in inside.volumes.items() if at == "/workspace")


@pytest.fixture(scope="module")
def server(image: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's address: compose.yaml's service, healthy by compose.yaml's own check, on another port."""
    port = free_port()

    def here(words: list[str]) -> list[str]:
        return [re.sub(r"\b5000\b", str(port), word).replace("0.0.0.0", "127.0.0.1") for word in words]

    folder = tmp_path_factory.mktemp("mlflow")
    mlflow, service = image.mounting(folder), COMPOSE["mlflow"]
    running = mlflow.start(folder / "server.log", *here(service["command"]), **service["environment"])
    kind, *check = here(service["healthcheck"]["test"])
    assert kind == "CMD"
    wait_for(lambda: running.poll() is not None or mlflow.run(*check).returncode == 0)
    assert running.poll() is None, (folder / "server.log").read_text()
    yield f"http://127.0.0.1:{port}"
    stop(running, signal.SIGTERM)


@pytest.fixture(scope="module")
def smoke(inside: Container, server: str) -> str:
    """What `dvc repro` prints inside, with MLflow inside too."""
    done = inside.run("dvc", "repro", MLFLOW_TRACKING_URI=server)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(condition: Callable[[], object]) -> None:
    """At most ten minutes: the machine may be busy."""
    until = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def stop(running: psutil.Popen, by: signal.Signals) -> int:
    """As `docker stop` does: a signal to the first process, and waits; its exit status. SIGKILL takes all processes."""
    everything = running.children(recursive=True)
    first = running if by == signal.SIGKILL else init_of(running)
    assert first is not None, "it has ended"
    first.send_signal(by)
    psutil.wait_procs(everything, 300)
    return running.wait(300)


def test_the_image_is_as_small_as_said_and_has_nothing_of_the_project(inside: Container) -> None:
    """docs/containers.md says how large, and why."""
    used = subprocess.run(["du", "-sm", inside.root], capture_output=True, text=True, check=True)
    assert int(used.stdout.split()[0]) < 2300
    assert not list((inside.root / "workspace").iterdir())
    assert not list((inside.root / "cache").iterdir())
    for name in ("requirements.lock", "params.yaml", "dvc.lock", ".env"):
        assert not list((inside.root / "tmp").rglob(name)) and not list((inside.root / "root").rglob(name))
    settings = config()
    assert settings["User"] == "1000:1000" and settings["StopSignal"] == "SIGINT"
    assert not [variable for variable in settings["Env"] if re.match("PIP_|.*(TOKEN|PASSWORD|SECRET)", variable)]
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_nothing_else_can_get_into_a_layer(tmp_path: Path) -> None:
    """.dockerignore: of the whole project, with its data, artifacts and whatever lies about, two files are sent."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    tag = "localhost/solo-rlhf-context"
    buildah("bud", "--isolation", "chroot", "--file", str(tmp_path / "Dockerfile"), "--tag", tag, str(ROOT))
    sent = buildah("from", "--pull-never", tag)
    root = Path(buildah("mount", sent))
    assert sorted(path.name for path in root.iterdir() if path.is_file()) == [
        "requirements-model.lock",
        "requirements.lock",
    ]
    buildah("rm", sent)
    buildah("rmi", tag)


def test_a_torch_that_is_no_choice_is_an_error(tmp_path: Path) -> None:
    """Of the Dockerfile's own words: without them a CPU image would be built."""
    text = (ROOT / "Dockerfile").read_text()
    choice = text[text.index("case ") : text.index("esac") + len("esac")]
    said = subprocess.run(["sh", "-c", choice], env={"TORCH": "gpu"}, capture_output=True, text=True, check=False)
    assert said.returncode == 1 and said.stderr == "TORCH is 'gpu' but must be cpu or cuda.\n"


def test_a_user_without_a_name_has_a_home_and_caches(inside: Container) -> None:
    """Report pytorch/pytorch#140765: torch asked for the user's name to choose a cache, and died of a KeyError."""
    program = """
import getpass, os, pathlib, pwd
from torch._inductor.runtime.runtime_utils import cache_dir
try:
    raise SystemExit(f"{pwd.getpwuid(os.getuid())} has a name")
except KeyError:
    print(os.getuid(), getpass.getuser(), pathlib.Path.home(), cache_dir())
"""
    done = inside.run("python", "-c", program)
    assert done.stdout.split() == [str(UID), "solo", "/cache", "/cache/torchinductor"], done.stderr


def test_git_answers_in_a_checkout_of_somebody_else(inside: Container, tmp_path: Path) -> None:
    """safe.directory: MLflow's tag with the commit would be empty."""
    (tmp_path / "of_root").mkdir()
    other = replace(inside, volumes={clone_to(tmp_path / "of_root"): "/workspace"})
    asked = other.run("git", "rev-parse", "HEAD")
    assert re.fullmatch(r"[0-9a-f]{40}\n", asked.stdout), asked.stderr


def test_the_smoke_pipeline_gives_the_same_lock_as_outside(outside: Path, inside: Container, smoke: str) -> None:
    assert stages_run(smoke) == ["prepare", "sft", "reward", "judge", "ppo", "evaluate"]
    assert (clone_of(inside) / "dvc.lock").read_text() == (outside / "dvc.lock").read_text()


def test_what_it_wrote_lies_on_the_volumes_and_belongs_to_its_user(inside: Container, smoke: str) -> None:
    """Reports mlflow/mlflow#6515 and #2883, on folders that a container made as root."""
    for folder in inside.volumes:
        paths = [folder, *folder.rglob("*")]
        assert len(paths) > 1
        assert {path.lstat().st_uid for path in paths} == {UID}
    written = subprocess.run(
        ["find", inside.root, "-xdev", "-uid", str(UID), "-not", "-path", "*/tmp/*"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert written.stdout == ""


def test_mlflow_was_told_over_http(server: str, smoke: str) -> None:
    """Report mlflow/mlflow#6515: with figures and files, and no path of a container in the experiment."""
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("solo-rlhf")
    assert experiment.artifact_location.startswith("mlflow-artifacts:/")
    runs = {found.info.run_name: found for found in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"seed 17", "prepare", "sft", "reward", "judge", "ppo", "evaluate"}
    assert {found.info.status for found in runs.values()} == {"FINISHED"}
    ppo = runs["ppo"].info.run_id
    assert len(client.get_metric_history(ppo, "score_mean")) == 3
    assert [found.path for found in client.list_artifacts(ppo, "samples")]
    assert re.fullmatch("[0-9a-f]{40}", runs["ppo"].data.tags["git.commit"])


def test_mlflow_answers_to_its_own_names_only(server: str) -> None:
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/experiments/search?max_results=1", headers={"Host": "evil.example"}
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)


def test_what_is_done_outside_is_not_done_again_inside(image: Container, outside: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(outside, clone, symlinks=True)
    again = image.mounting(clone).run("dvc", "repro")
    assert again.returncode == 0, again.stderr
    assert stages_run(again.stdout) == [] and "up to date" in again.stdout


def test_stopped_three_times_in_ppo_it_goes_on_to_the_same_bytes(
    outside: Path, inside: Container, smoke: str, tmp_path: Path
) -> None:
    """One single stage: stopped with SIGINT, as `docker stop` does by STOPSIGNAL, with SIGTERM, which others send, and killed.

    Report iterative/dvc#3370: numbers of processes come again in a new container; what a killed DVC left must not hold up the next.
    """
    clone, log = clone_of(inside), tmp_path / "log"
    for folder in (outside, clone):
        params = folder / "params.yaml"
        params.write_text(params.read_text().replace("iterations: 3\n", f"{LONGER}\n", 1))
        assert LONGER in params.read_text()
    undisturbed = run(outside, "dvc", "repro", "-s", "ppo")
    assert stages_run(undisturbed.stdout) == ["ppo"], undisturbed.stderr

    def checkpoints() -> list[Path]:
        return sorted((clone / ".work/ppo").glob("*/step-*[0-9]"))

    def interrupted(by: signal.Signals) -> str:
        before = checkpoints()
        running = inside.start(log, "dvc", "repro", "-s", "ppo")
        wait_for(lambda: checkpoints() != before or not running.is_running())
        assert stop(running, by) != 0
        said, _ = log.read_text(), log.unlink()
        return said

    assert "ppo: stopped by SIGINT; the next run goes on after iteration" in interrupted(signal.SIGINT)
    assert {path.stat().st_uid for path in checkpoints()} == {UID}
    said = interrupted(signal.SIGTERM)
    assert "ppo: goes on after iteration" in said and "ppo: stopped by SIGINT; the next run goes on after" in said
    assert "ppo: goes on after iteration" in interrupted(signal.SIGKILL)
    done = inside.run("dvc", "repro", "-s", "ppo")
    assert done.returncode == 0 and "ppo: goes on after iteration" in done.stdout, done.stdout + done.stderr
    assert (clone / "dvc.lock").read_text() == (outside / "dvc.lock").read_text()
    for name in ARTIFACTS[:-1]:  # evaluate has not run again
        assert hash_path(clone / "artifacts" / name) == hash_path(outside / "artifacts" / name)
