"""What SECURITY.md promises and a test can see."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT
from ruamel.yaml import YAML
from test_layout import MODULES

from pipeline.masking import masked

PICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}  # all of them run code that a file holds
SOURCES = [*MODULES, *(file.relative_to(ROOT) for file in (ROOT / "benchmarks").glob("*.py"))]
RECIPES = [Path("params.yaml"), *(file.relative_to(ROOT) for file in (ROOT / "recipes").glob("*.yaml"))]


def calls(tree: ast.AST) -> list[tuple[str, dict[str, ast.expr]]]:
    """(name of what is called, its keyword arguments)."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), {word.arg: word.value for word in call.keywords}) for call in found]


def says(value: ast.expr | None, constant: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


@pytest.mark.parametrize("file", SOURCES, ids=str)
def test_nothing_is_unpickled(file: Path) -> None:
    """Weights are safetensors, tables and states are JSON; what torch.load reads is weights only."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not PICKLERS & {name.split(".")[0] for name in imported}
    for name, keywords in calls(tree):
        assert not name.endswith("torch.load") or says(keywords.get("weights_only"), True)
        assert not says(keywords.get("allow_pickle"), True)
        if re.search(r"AutoModel\w*\.from_pretrained$", name) and "gguf_file" not in keywords:
            assert says(keywords.get("use_safetensors"), True)


@pytest.mark.parametrize("file", SOURCES, ids=str)
def test_remote_code_is_trusted_by_the_parameter_alone(file: Path) -> None:
    for _, keywords in calls(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        assert not says(keywords.get("trust_remote_code"), True)


@pytest.mark.parametrize("file", RECIPES, ids=str)
def test_no_recipe_trusts_remote_code(file: Path) -> None:
    assert YAML(typ="safe").load((ROOT / file).read_text(encoding="utf-8"))["base"]["trust_remote_code"] is False


def test_mlflow_listens_on_this_machine_only() -> None:
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\tmlflow ui "))
    assert "--host 127.0.0.1" in line


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://me:pass@host:5000/a", "http://***@host:5000/a"),
        ("postgresql://me:p@ss@host/db and http://host/a@b", "postgresql://***@host/db and http://host/a@b"),
        ('{"u": "https://host", "mail": "me@host"}', '{"u": "https://host", "mail": "me@host"}'),
        ("token hf_abcdefgh, key AKIA12345678", "token ***, key ***"),
        ("false, short", "false, short"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ],
)
def test_secrets_are_masked(text: str, left: str) -> None:
    """By the names of variables; not what only looks like one (TOKENIZERS_PARALLELISM), nor a word that is too short."""
    environment = {
        "HF_TOKEN": "hf_abcdefgh",
        "AWS_SECRET_ACCESS_KEY": "AKIA12345678",
        "TOKENIZERS_PARALLELISM": "false",
        "MY_PASSWORD": "short",
    }
    assert masked(text, environment) == left
