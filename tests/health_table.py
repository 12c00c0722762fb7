"""The tables of docs/health.md, made from the rules: `python -m tests.health_table` prints them."""

import inspect

from pipeline.health.answers import RULES as ANSWERS
from pipeline.health.findings import Rule
from pipeline.health.learning import RULES as LEARNING
from pipeline.health.memory import OUT_OF_MEMORY
from pipeline.health.supervised import ACCURACY_AT_CHANCE, BEHIND_BASELINE, LOSS_RISES, NO_GAIN, NOT_FINITE

PARTS = {
    "Every training stage": (NOT_FINITE, OUT_OF_MEMORY),
    "sft, reward, judge and dpo": (LOSS_RISES, NO_GAIN, ACCURACY_AT_CHANCE, BEHIND_BASELINE),
    "ppo: learning": LEARNING,
    "ppo: the answers": ANSWERS,
}


def text_of(rule: Rule) -> tuple[str, str]:
    """When a rule speaks, and why its limit is where it is: its look's docstring, on one line each."""
    when, _, why = inspect.getdoc(rule.look).partition("\n\n")
    return " ".join(when.split()), " ".join(why.split())


def tables() -> str:
    """All rules, part by part."""
    lines = []
    for title, rules in PARTS.items():
        lines += [f"## {title}", "", "| rule | seen | likely cause | what to change |", "|---|---|---|---|"]
        for rule in rules:
            cause, change = (text.format(stage="STAGE") for text in (rule.cause, rule.change))
            lines.append(f"| `{rule.name}` | {text_of(rule)[0]} | {cause} | {change} |")
        lines += ["", *(f"- `{rule.name}`: {text_of(rule)[1]}" for rule in rules), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
