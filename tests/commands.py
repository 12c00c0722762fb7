"""The commands that the documentation names: lines of its code blocks, and code spans of two words or more."""

import re
from collections.abc import Iterator
from itertools import groupby

from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# What begins with another word is a key, a path or printed output. A block whose language is sh or bash has commands alone.
PROGRAMS = {
    *("make", "dvc", "git", "python", "pip", "pytest", "mlflow", "torchrun", "deploy/run.sh", "jq", "docker", "buildah", "kubectl"),
    *("sky", "source", "printf", "rm", "cp", "mv", "export", "sh", "bash", "grep", "curl", "apt", "apt-get", "sudo"),
}  # fmt: skip
SHELL = {"sh", "bash", "shell", "console"}
FENCE = re.compile(r"```(\w*)\s*")
SPAN = re.compile(r"`([^`]+)`")
COMMENT = re.compile(r"(?:^|\s)#\s.*")
CONTINUED = re.compile(r"\s*\\\n\s*")


def documented() -> dict[str, str]:
    """command -> the page that names it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in commands_of(page.read_text(encoding="utf-8")):
            found.setdefault(command, page.relative_to(ROOT).as_posix())
    return found


def commands_of(page: str) -> Iterator[str]:
    """The commands of a page in Markdown, each in one line, without comments."""
    for kind, text in stretches(page):
        if kind == "prose":
            spans = (
                " ".join(span.split()) for paragraph in re.split(r"\n\s*\n", text) for span in SPAN.findall(paragraph)
            )
            yield from (span for span in spans if " " in span and is_command(span))
        elif kind in SHELL or (kind == "indented" and any(map(is_command, text.splitlines()))):
            lines = (COMMENT.sub("", line).strip() for line in CONTINUED.sub(" ", text).splitlines())
            yield from filter(None, lines)


def stretches(page: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each stretch of lines: `prose`, `indented` by four, or the language of a fenced block, which may be empty."""
    kinds = []
    fenced: str | None = None
    for line in page.splitlines():
        fence = FENCE.fullmatch(line)
        kinds.append("fence" if fence else fenced if fenced is not None else kind_of(line))
        if fence:
            fenced = fence[1] if fenced is None else None
    for kind, lines in groupby(zip(kinds, page.splitlines(), strict=True), key=lambda pair: pair[0]):
        yield kind, "\n".join(line for _, line in lines)


def kind_of(line: str) -> str:
    """Of a line outside fences; a blank line parts two blocks."""
    return "indented" if line.startswith("    ") and line.strip() else "prose"


def is_command(text: str) -> bool:
    """Whether its first word is a program."""
    return text.split(maxsplit=1)[0] in PROGRAMS
