"""The pages of docs/ that are made from code, so that there is one text: `make docs` writes them."""

import json
from pathlib import Path
from typing import Any, get_args

from health_table import PARTS, text_of
from pydantic.fields import FieldInfo

from pipeline.health.findings import Rule
from pipeline.params.check import SECTIONS
from pipeline.params.reward_terms import RewardTerm
from pipeline.params.section import Section, keys_of, read_params

ROOT = Path(__file__).parent.parent
LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "at least {} of them",
}
SYMPTOMS = {
    "The score does not rise": ("policy-still", "score-flat", "scores-without-spread", "advantages-negative"),
    "The score rises, the answers get worse": (
        "over-optimisation",
        "repeated-text",
        "length-collapse",
        "length-blow-up",
    ),
    "KL does odd things": ("kl-at-start", "kl-negative", "kl-spike"),
    "All answers look alike, or do not end": ("entropy-collapse", "answers-cut"),
    "The update fights itself": ("clipping", "updates-cut-short", "critic-misleads"),
    "The loss rises, or is NaN": ("loss-rises", "no-gain", "not-finite"),
    "The reward model cannot tell answers apart": ("accuracy-at-chance", "behind-baseline"),
    "Out of memory": ("out-of-memory",),
}
PARAMETERS_HEAD = """\
# Every parameter

Made from the schema in `pipeline/params/` by `make docs`; do not edit. "Default" is recipes/demo.yaml. Outside of "may be" is an error
before any weight is loaded; outside of "usual" is a warning with the reason. A change reruns the stages that read the parameter, and those
after them; `runtime` reruns nothing.

`seed` (default {seed}): from it every stage derives its own noise; a whole number from 0 to 2147483647.
"""
TROUBLESHOOTING_HEAD = """\
# Troubleshooting by symptom

Made from the health rules by `make docs`, so that this page and what a run prints are one text; do not edit. `make health` says which of
these the last run has, with its numbers; [health.md](health.md) says why each limit is where it is; `make diagnose`
([diagnose.md](diagnose.md)) tells a fault of the code from one of the settings. Figures: [metrics.md](metrics.md).
"""


def parameters_page() -> str:
    """Section by section: name, meaning, default, what it may be."""
    demo = read_params(ROOT / "recipes/demo.yaml")
    lines = [PARAMETERS_HEAD.format(seed=demo["seed"])]
    for name, kind in SECTIONS.items():
        lines += _section(name, kind, demo[name])
    for kind in get_args(get_args(RewardTerm)[0]):
        word = get_args(kind.model_fields["term"].annotation)[0]
        lines += _section(f"ppo.reward, term: {word}", kind, {})
    return "\n".join(lines)


def _section(title: str, kind: type[Section], values: dict[str, Any]) -> list[str]:
    inner: list[str] = []
    lines = [f"## {title}", "", _cell(kind.__doc__ or ""), ""]
    lines += ["| parameter | meaning | default | may be | usual |", "|---|---|---|---|---|"]
    for key, field in keys_of(kind).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            inner += _section(f"{title}.{key}", field.annotation, values.get(key, {}))
            continue
        default = f"`{_yaml(values[key])}`" if key in values else "-"
        lines.append(f"| `{key}` | {_cell(field.description)} | {default} | {_limits(field)} | {_usual(field)} |")
    return [*lines, "", *inner]


def _limits(field: FieldInfo) -> str:
    words = [
        text.format(getattr(item, key)) for item in field.metadata for key, text in LIMITS.items() if hasattr(item, key)
    ]
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    return _cell(", ".join(words) or " or ".join(f"`{choice}`" for choice in choices) or "-")


def _usual(field: FieldInfo) -> str:
    usual = field.json_schema_extra["usual"]
    return f"{usual[0]:g} to {usual[1]:g}: {_cell(field.json_schema_extra['why'])}" if usual else "-"


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def troubleshooting_page() -> str:
    """Symptom by symptom: what is seen, likely cause, what to change."""
    rules: dict[str, Rule] = {rule.name: rule for part in PARTS.values() for rule in part}
    lines = [TROUBLESHOOTING_HEAD]
    for symptom, names in SYMPTOMS.items():
        lines += [f"## {symptom}", ""]
        for rule in (rules[name] for name in names):
            cause, change = (text.format(stage="STAGE") for text in (rule.cause, rule.change))
            lines += [
                f"- **{text_of(rule)[0]}** (`{rule.name}`)  ",
                f"  Likely cause: {cause}  ",
                f"  Change: {change}",
            ]
        lines.append("")
    return "\n".join(lines)


PAGES = {"parameters.md": parameters_page, "troubleshooting.md": troubleshooting_page}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (ROOT / "docs" / file).write_text(page(), encoding="utf-8")
