"""The price of a nat of KL: fixed, or moved toward a target."""

from dataclasses import dataclass, replace

ERROR_LIMIT = 0.2  # however far off the KL is, the price moves no faster


@dataclass(frozen=True)
class KLControl:
    """The proportional controller of Ziegler et al. 2019, section 2.2. `coef` is all the state there is.

    coef: what a nat costs now.
    target: nats per answer to the reference (mean of the summed k1); None: the price stays.
    horizon: answers in which the price grows or falls by about a fifth at most.
    """

    coef: float
    target: float | None
    horizon: int

    def after(self, kl: float, answers: int) -> "KLControl":
        """The control after `answers` answers whose mean KL was `kl` nats each."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -ERROR_LIMIT), ERROR_LIMIT)
        return replace(self, coef=self.coef * (1 + error * answers / self.horizon))
