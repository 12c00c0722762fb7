"""What the project's modules import, read from their source."""

import ast
import sys
from collections.abc import Collection
from pathlib import Path

from ruamel.yaml import YAML

from pipeline.lineage import DVC_FILES

ROOT = Path(__file__).parent.parent


def module_path(module: str) -> Path | None:
    """The project file of a dotted module name, relative to the root; None where it is not ours."""
    for candidate in (Path(*module.split(".")).with_suffix(".py"), Path(*module.split(".")) / "__init__.py"):
        if (ROOT / candidate).is_file():
            return candidate
    return None


def direct_imports(file: Path) -> set[Path]:
    """Our own modules that a file imports, wherever in the file, with the packages they are in."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            found |= {path for size in range(1, len(parts) + 1) if (path := module_path(".".join(parts[:size])))}
    # the packages that a module is in run before it
    found |= {parent / "__init__.py" for parent in file.parents if (ROOT / parent / "__init__.py").is_file()}
    return found - {file}


def closure(file: Path, beyond: Collection[Path] = ()) -> set[Path]:
    """All our modules that a file needs, itself included, but for those `beyond` and what only they need."""
    seen: set[Path] = set()
    waiting = [file]
    while waiting:
        current = waiting.pop()
        if current not in seen and current not in beyond:
            seen.add(current)
            waiting += direct_imports(current)
    return seen


def dvc_stages() -> dict[str, dict]:
    """The stages of all DVC files."""
    found: dict[str, dict] = {}
    for file in DVC_FILES:
        stages = YAML(typ="safe").load((ROOT / file).read_text(encoding="utf-8"))["stages"]
        assert not found.keys() & stages.keys(), "a stage's name is taken"
        found |= stages
    return found


def stage_file(name: str) -> Path:
    """The file that a DVC stage runs: `python -m stages.reward judge` runs stages/reward.py."""
    module = dvc_stages()[name]["cmd"].split()[2]
    return Path(*module.split(".")).with_suffix(".py")


# Modules that cannot change a stage's output bytes: they raise, report, draw, wait, start or end processes, or refuse to start.
# Through them nothing that they import can either.
EXEMPT = {
    *(
        Path("pipeline", name)
        for name in (
            "errors.py",
            "masking.py",
            "progress.py",
            "banner.py",
            "candidate.py",
            "interruption.py",
            "finished.py",
            "lock.py",
            "launch.py",
            "data/enough.py",
        )
    ),
    *(
        path.relative_to(ROOT)
        for name in ("health", "tracking", "planning")
        for path in (ROOT / "pipeline" / name).glob("*.py")
    ),
}


def code_deps(stage: str) -> list[str]:
    """The code that a stage must name in dvc.yaml."""
    return sorted(path.as_posix() for path in closure(stage_file(stage), beyond=EXEMPT))


if __name__ == "__main__":
    print("\n".join(f"      - {path}" for path in code_deps(sys.argv[1])))
