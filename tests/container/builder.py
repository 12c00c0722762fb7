"""Images and containers without a daemon: debootstrap makes a base, buildah builds and runs, in a chroot (Debian's packages of these names)."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from conftest import ROOT
from platformdirs import user_cache_path

UID = 12345  # of nobody: neither the image nor this machine has a line for it in /etc/passwd
# The base, 0.2 GB, is kept from one run of the tests to the next; the rest goes.
STORAGE = user_cache_path("solo-rlhf") / "container-tests"
# vfs copies whole layers, but works on any file system, and inside of containers too; the variable is buildah's own
DRIVER = os.environ.get("STORAGE_DRIVER", "vfs")
BUILDAH = ["buildah", "--root", str(STORAGE / "root"), "--runroot", str(STORAGE / "run"), "--storage-driver", DRIVER]
BASE = "localhost/solo-rlhf-base:bookworm"
IMAGE = "localhost/solo-rlhf:tested"
CACHES = ("/cache", "/var/cache/dvc")


def why_not() -> str | None:
    """Why this machine cannot build: None where it can."""
    missing = [tool for tool in ("buildah", "debootstrap", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing: apt-get install buildah debootstrap util-linux"
    if os.geteuid() != 0:
        return "debootstrap and chroot are for root alone"
    return None


def buildah(*words: str) -> str:
    """What a command of buildah prints."""
    done = subprocess.run([*BUILDAH, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"buildah {' '.join(words)}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    return done.stdout.strip()


def make_base() -> None:
    """A minimal Debian, once."""
    if buildah("images", "--quiet", "--filter", f"reference={BASE}"):
        return
    container = buildah("from", "scratch")
    root = buildah("mount", container)
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    buildah("commit", "--quiet", "--rm", container, BASE)


def build(folder: Path) -> None:
    """The Dockerfile on that base, with this machine's settings of pip, which stay outside."""
    make_base()
    options = ["--isolation", "chroot", "--build-arg", f"BASE={BASE}", "--tag", IMAGE]
    buildah("bud", *options, *pip_settings(folder), str(ROOT))


def pip_settings(folder: Path) -> list[str]:
    """Options that mount what variables PIP_... say, as a file that pip reads, and the files and folders of this machine that they name.

    These lie in /mnt, not where they are: Debian's certificates are installed while the image is built.
    """
    mounts, lines = [f"{folder / 'pip.conf'}:/etc/pip.conf:ro"], ["[global]"]
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            key = name.removeprefix("PIP_").lower().replace("_", "-")
            named = value.startswith("/") and Path(value).exists()
            lines.append(f"{key} = {f'/mnt/{key}' if named else value}")
            mounts += [f"{value}:/mnt/{key}:ro"] if named else []
    (folder / "pip.conf").write_text("\n".join([*lines, ""]))
    return [word for mount in mounts for word in ("--volume", mount)]


@dataclass(frozen=True)
class Container:
    """A container of the image. Several commands may run in it, each with volumes of its own, as it cannot write to anything else.

    name: buildah's.
    entrypoint: the image's; buildah itself does not start it.
    root: where its file system lies, without the volumes.
    volumes: folder of this machine -> folder inside.
    """

    name: str
    entrypoint: tuple[str, ...]
    root: Path
    volumes: dict[Path, str]

    def mounting(self, checkout: Path) -> "Container":
        """The same with volumes as compose.yaml has them: a checkout, and new ones for the caches, all given to UID."""
        caches = {checkout.with_name(f"{checkout.name}_{at.name}"): str(at) for at in map(Path, CACHES)}
        for folder in caches:
            folder.mkdir()
        for folder in (checkout, *caches):
            subprocess.run(["chown", "--recursive", f"{UID}:{UID}", str(folder)], check=True)
        return replace(self, volumes={checkout: "/workspace", **caches})

    def command(self, *words: str, **environment: str) -> list[str]:
        """The command line that runs the words inside, in a space of process numbers of their own.

        Whoever started the tests may ignore SIGINT, as a shell does for `&`, and children inherit that.
        """
        mounts = [word for at, inside in self.volumes.items() for word in ("--volume", f"{at}:{inside}")]
        variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        return [
            *("env", "--default-signal=INT", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *(*BUILDAH, "run", "--isolation", "chroot", "--user", f"{UID}:{UID}", *mounts, *variables),
            *(self.name, "--", *self.entrypoint, *words),
        ]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs them to their end."""
        return subprocess.run(self.command(*words, **environment), capture_output=True, text=True, check=False)

    def start(self, log: Path, *words: str, **environment: str) -> psutil.Popen:
        """Starts them; what they print goes to a file."""
        with log.open("ab") as stream:
            return psutil.Popen(self.command(*words, **environment), stdout=stream, stderr=stream)


def container() -> Container:
    """A container without volumes."""
    name = buildah("from", "--pull-never", IMAGE)
    # Mounted here once: a mount that `buildah run` makes is seen by nobody outside of its `unshare`, yet counted.
    return Container(name, tuple(config()["Entrypoint"]), Path(buildah("mount", name)), {})


def config() -> dict:
    """The image's configuration, as Docker reads it."""
    return json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]


def init_of(running: psutil.Popen) -> psutil.Process | None:
    """What a container's runtime sends signals to: its first process."""
    return next((child for child in running.children(recursive=True) if child.name() == "dumb-init"), None)
