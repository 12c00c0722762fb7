"""What every objective returns."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """A sum of loss terms, to be divided once by the optimizer step's global number of terms.

    loss_sum: differentiable scalar.
    sums: detached scalars to be added up over micro-batches and divided by the same number.
    maxima: detached scalars of which the largest is kept.
    """

    loss_sum: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def uncounted(self) -> "Terms":
        """A loss of 0 that depends on what this one depends on, and no figures."""
        return Terms(0 * self.loss_sum, {})
