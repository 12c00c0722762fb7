"""The runs that entries are about, and the two ways in which MLflow does not take one."""

from dataclasses import dataclass

from pipeline.tracking.spool import Entry


class Unavailable(Exception):
    """MLflow cannot take anything now; all of it must be tried again later."""


class Refused(Exception):
    """MLflow takes other things, but not this."""


@dataclass(frozen=True)
class Runs:
    """MLflow's names of a stage's run and of its parent."""

    run: str
    parent: str

    def of(self, entry: Entry) -> str:
        """The one that an entry is about."""
        return self.parent if entry.get("on") == "parent" else self.run
