"""Where the online loop is: what it carries from one optimizer step to the next, beside weights."""

from dataclasses import dataclass, fields, replace
from typing import Any

from pipeline.batch import Experience
from pipeline.kl_control import KLControl
from pipeline.update import Figures


@dataclass
class Place:
    """Iterations that are done, and how far the next one is.

    kl: the price of KL in the next iteration.
    experience: its rollout, evaluated; None before that.
    taken: figures of the optimizer steps that its update has taken.
    """

    kl: KLControl
    iteration: int = 0
    experience: Experience | None = None
    taken: tuple[Figures, ...] = ()

    def __str__(self) -> str:
        if self.experience is None:
            return f"iteration {self.iteration}"
        return f"iteration {self.iteration}, the next rollout and {len(self.taken)} optimizer steps with it"

    def next(self, kl: KLControl) -> None:
        """The iteration is done."""
        self.kl, self.iteration, self.experience, self.taken = kl, self.iteration + 1, None, ()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        experience = self.experience
        return {
            "kl_coef": self.kl.coef,
            "iteration": self.iteration,
            "experience": experience and {field.name: getattr(experience, field.name) for field in fields(experience)},
            "taken": self.taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.iteration = state["iteration"]
        self.experience = state["experience"] and Experience(**state["experience"])
        self.taken = tuple(state["taken"])
