"""What a rule is, what it finds, and how a finding is said once."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.health.curve import Curve, Row

CALM = 3  # steps without it, after which a finding that returns is news again; fewer, and a figure at its limit would flicker
KEY = re.compile(r"(?<!/)\b[a-z]+(?:\.[a-z_]+)+")  # ppo.lr, data.split.ppo


@dataclass(frozen=True)
class Finding:
    """Something wrong at a step: what is seen (with the numbers), the likely cause, and what to change in params.yaml."""

    rule: str
    step: int
    seen: str
    cause: str
    change: str


@dataclass(frozen=True)
class Rule:
    """A fault that can be read off a curve.

    look: what is seen at the curve's last step, with the numbers; None where all is well. Its docstring says when it
    speaks and why the limit is where it is; docs/health.md shows that text.
    cause, change: for people; `{stage}` stands for the stage's section of params.yaml.
    """

    name: str
    look: Callable[[Curve], str | None]
    cause: str
    change: str

    def finding(self, stage: str, step: int, seen: str, params: Mapping[str, str]) -> Finding:
        """The finding in words for a stage, the present value put after each parameter that is known."""
        change = KEY.sub(
            lambda key: f"{key[0]} (now {params[key[0]]})" if key[0] in params else key[0],
            self.change.format(stage=stage),
        )
        return Finding(self.name, step, seen, self.cause.format(stage=stage), change)


class Watcher:
    """Follows a curve as it grows.

    params: present values of params.yaml by dotted key, to be shown; may be empty.
    """

    def __init__(self, stage: str, rules: Sequence[Rule], params: Mapping[str, str]):
        self.stage = stage
        self.rules = rules
        self.params = params
        self.curve: list[Row] = []
        self._seen_at: dict[str, int] = {}  # rule -> the number of the last row at which it spoke

    def step(self, row: Row) -> list[Finding]:
        """The findings that are new with this row: not there before, or gone for a while and back."""
        self.curve.append(row)
        now = len(self.curve)
        new = []
        for rule in self.rules:
            seen = rule.look(self.curve)
            if seen is None:
                continue
            if now - self._seen_at.get(rule.name, -CALM) > CALM:
                new.append(rule.finding(self.stage, int(row.get("step", now - 1)), seen, self.params))
            self._seen_at[rule.name] = now
        return new
