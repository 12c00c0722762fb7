"""Which training state belongs to a run: any change of parameters, inputs or code starts afresh; nothing else does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.lineage import stage_definition, stage_inputs, state_key

DVC = """
stages:
  sft:
    cmd: python -m stages.sft
    params: [seed, sft, ppo.reward]
    deps: [data.jsonl, folder, "${code}", absent]
    outs: [out]
"""
PARAMS = "seed: 1\ncode: a.py\nsft: {lr: 1.0e-3}\nppo: {reward: [{term: x}], lr: 1}\nruntime: {threads: 2}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {"dvc.yaml": DVC, "alternatives/dvc.yaml": "stages: {}", "params.yaml": PARAMS, "data.jsonl": "{}"}
    for name, text in {**files, "a.py": "1", "progress.py": "1", "folder/x": "1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def key() -> str:
    return state_key("sft", stage_inputs(stage_definition("sft")))


def params(old: str, new: str) -> Callable[[], object]:
    return lambda: Path("params.yaml").write_text(PARAMS.replace(old, new))


@pytest.mark.parametrize(
    "change",
    [
        params("seed: 1", "seed: 2"),
        params("1.0e-3", "1.1e-3"),
        params("term: x", "term: y"),
        lambda: Path("data.jsonl").write_text("{ }"),
        lambda: Path("folder/y").touch(),
        lambda: Path("a.py").write_text("2"),
        lambda: Path("absent").touch(),
    ],
    ids=["seed", "parameter", "nested parameter", "input", "file in a folder", "module", "new input"],
)
def test_what_can_change_the_result_starts_afresh(project: Path, change: Callable[[], object]) -> None:
    """Report iterative/dvc#1214: a changed configuration must not go on from an old state."""
    before = key()
    change()
    assert key() != before


@pytest.mark.parametrize(
    "change",
    [
        params("threads: 2", "threads: 4"),
        params("lr: 1}", "lr: 2}"),
        params("1.0e-3", "0.001"),
        lambda: Path("progress.py").write_text("2"),
        lambda: Path("dvc.yaml").write_text(DVC + "  other: {cmd: x}\n"),
    ],
    ids=["runtime", "another stage's parameter", "same number", "exempt module", "another stage"],
)
def test_what_cannot_change_it_does_not(project: Path, change: Callable[[], object]) -> None:
    before = key()
    change()
    assert key() == before
