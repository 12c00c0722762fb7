"""Mean and variance of all scores so far, and scores relative to them."""

from dataclasses import asdict, dataclass

from torch import Tensor

EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Of numbers seen so far: how many, their mean, and the sum of their squared deviations from it; float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> "Moments":
        """The moments of one batch."""
        values = values.double()
        return cls(values.numel(), float(values.mean()), float(((values - values.mean()) ** 2).sum()))

    def merged(self, other: "Moments") -> "Moments":
        """As if both had been seen together (Chan, Golub and LeVeque 1983, equation 2.1); batches and ranks alike."""
        count = self.count + other.count
        shift = other.mean - self.mean
        return Moments(
            count,
            self.mean + shift * other.count / count,
            self.squares + other.squares + shift**2 * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Population variance."""
        return self.squares / self.count


class RawScores:
    """Scores as they are, in the place of a `ScoreNormalizer`."""

    def __call__(self, scores_B: Tensor) -> Tensor:
        """The same."""
        return scores_B

    def state_dict(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to go on with."""


class ScoreNormalizer:
    """(score - mean) / sqrt(variance + 1e-8) over all scores so far, those of the present batch included.

    A reward model's scale is arbitrary and drifts as the policy moves; the critic must follow it. One score, or scores
    that are all equal, become 0.
    """

    def __init__(self) -> None:
        self.moments = Moments()

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Takes the scores in, then gives them relative to all; float32, [B]."""
        self.moments = self.moments.merged(Moments.of(scores_B))
        deviations_B = scores_B.double() - self.moments.mean
        return (deviations_B / (self.moments.variance + EPSILON) ** 0.5).float()

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return asdict(self.moments)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where `state_dict` was taken."""
        self.moments = Moments(**state)
