"""What the doctor says of one thing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    subject: what was looked at.
    state: ok: as it should be. note: the pipeline runs, and a person should know. fix: it will not run, or not as it should.
    text: what was found.
    remedy: what to do; empty where there is nothing to do.
    """

    subject: str
    state: Literal["ok", "note", "fix"]
    text: str
    remedy: str = ""
