"""hf://org/name@revision against a hub of a few lines on loopback."""

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from pipeline.base_model import fingerprint
from pipeline.lineage import unpinned
from pipeline.params.section import read_params

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOCATE = "from pipeline.base_model import locate; print(locate({spec!r}))"


@pytest.fixture
def hub(tiny_folders: Callable[..., Path]) -> Iterator[str]:
    """The address of a hub that has one model, org/name, with one commit."""
    folder = tiny_folders()
    files = {file.name: file.read_bytes() for file in folder.iterdir()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = self.path.partition("?")[0]
            if place == f"/api/models/org/name/revision/{COMMIT}":
                siblings = [{"rfilename": name} for name in sorted(files)]
                self._send(
                    json.dumps({"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
                )
            elif place == f"/api/models/org/name/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in sorted(files.items())
                ]
                self._send(json.dumps(tree).encode())
            elif self.path.startswith(f"/org/name/resolve/{COMMIT}/"):
                self._send(files[self.path.rpartition("/")[2]])
            elif place in ("/api/models/org/name/revision/main", "/api/datasets/org/pairs/revision/v1"):
                self._send(json.dumps({"id": place.split("/")[3], "sha": COMMIT}).encode())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def locate(spec: str, hub: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return run(hub, cache, ROOT, "-c", LOCATE.format(spec=spec))


def run(hub: str, cache: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_comes_from_the_hub_at_its_revision(
    hub: str, tiny_folders: Callable[..., Path], tmp_path: Path
) -> None:
    found = locate(f"hf://org/name@{COMMIT}", hub, tmp_path)
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.strip().splitlines()[-1])
    assert folder.name == COMMIT
    assert fingerprint(folder) == fingerprint(tiny_folders())


def test_a_model_that_the_hub_does_not_have_is_named(hub: str, tmp_path: Path) -> None:
    found = locate(f"hf://org/other@{COMMIT}", hub, tmp_path)
    assert f"base.model is 'hf://org/other@{COMMIT}' but the hub did not give it" in found.stderr
    assert "check name, revision, network and HF_TOKEN" in found.stderr


PARAMS = """\
seed: 1
base:
  model: hf://org/name@main  # the branch
reward: {{from: hf://org/name@{commit}}}
data:
  pairs: pairs.hf
"""


def test_pin_writes_the_commit_of_each_revision_that_can_move(hub: str, tmp_path: Path) -> None:
    """Comments stay, what is pinned stays, and a .hf file is pinned in its own place."""
    (tmp_path / "params.yaml").write_text(PARAMS.format(commit="f" * 40))
    (tmp_path / "pairs.hf").write_text("hf://org/pairs@v1:train[:5%]\n")
    before = read_params(tmp_path / "params.yaml")
    with contextlib.chdir(tmp_path):
        assert unpinned(before) == ["base.model", "data.pairs"]
    done = run(hub, tmp_path / "cache", tmp_path, "-m", "pipeline.pin")
    assert done.returncode == 0, done.stderr
    assert f"base.model: org/name main -> {COMMIT}" in done.stdout and "data.pairs: org/pairs v1" in done.stdout
    text = (tmp_path / "params.yaml").read_text()
    assert text == PARAMS.format(commit="f" * 40).replace("@main", f"@{COMMIT}")
    assert (tmp_path / "pairs.hf").read_text() == f"hf://org/pairs@{COMMIT}:train[:5%]\n"
    with contextlib.chdir(tmp_path):
        assert unpinned(read_params()) == []
    assert "is a commit already" in run(hub, tmp_path / "cache", tmp_path, "-m", "pipeline.pin").stdout


def test_a_revision_that_the_hub_does_not_have_is_not_pinned(hub: str, tmp_path: Path) -> None:
    text = PARAMS.format(commit="f" * 40).replace("@main", "@mian")
    (tmp_path / "params.yaml").write_text(text)
    done = run(hub, tmp_path / "cache", tmp_path, "-m", "pipeline.pin")
    assert done.returncode == 1 and "base.model names org/name at mian but the hub did not say" in done.stdout
    assert (tmp_path / "params.yaml").read_text() == text
