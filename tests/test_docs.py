"""The pages that are made from code are up to date, and every figure is explained."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT
from health_table import PARTS
from pages import PAGES, SYMPTOMS
from tutorial import blocks

from pipeline.params.check import SECTIONS
from pipeline.params.section import keys_of

WORD = re.compile(r"`([\w./]+)`")
# Names of parts, roles, rows and data, no figures; a parameter of a figure's table, such as a percentile.
NOT_FIGURES = {
    *("base", "sft", "policy", "dpo", "reward", "judge", "ppo", "heldout", "development"),
    *("answer", "prompt", "chosen", "rejected", "pairs", "count", "mean", "low", "high", "max", "p5", "p50", "p90", "p99", "data"),
    *("prompt with chosen and rejected", "accuracy"),
}  # fmt: skip


@pytest.mark.parametrize("file", PAGES)
def test_pages_made_from_code_are_up_to_date(file: str) -> None:
    assert (ROOT / "docs" / file).read_text(encoding="utf-8") == PAGES[file](), "run `make docs`"


def test_every_rule_is_a_symptom() -> None:
    listed = [name for names in SYMPTOMS.values() for name in names]
    assert sorted(listed) == sorted({rule.name for part in PARTS.values() for rule in part})


def test_every_parameter_is_on_its_page() -> None:
    page = (ROOT / "docs/parameters.md").read_text(encoding="utf-8")
    for name, kind in SECTIONS.items():
        part = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        nested = page.partition(f"\n## {name}.split\n")[2]
        for key in keys_of(kind):
            assert f"| `{key}` |" in part or (key == "split" and nested), f"{name}.{key}"


def keys(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from keys(value)


def test_every_logged_figure_is_explained() -> None:
    explained = set(WORD.findall((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))) | NOT_FIGURES
    logged = {
        column for file in (ROOT / "plots").glob("*.tsv") for column in file.read_text().partition("\n")[0].split("\t")
    }
    for file in (ROOT / "metrics").glob("*.json"):
        logged |= set(keys(json.loads(file.read_text(encoding="utf-8"))))
    numbered = re.compile(r"(step|seed|ppo_seed|reinforce_seed|reinforce_without_baseline_seed)_\d+")
    unexplained = {name for name in logged - explained if not numbered.fullmatch(name)}
    assert len(logged) > 100 and unexplained == set()


def test_the_tutorial_prints_what_it_says() -> None:
    ran = [(block["text"], printed) for block, printed in blocks()]
    assert len(ran) == 12
    for said, printed in ran:
        assert printed == said, "run `make docs`"
