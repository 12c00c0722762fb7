"""Per-token estimates of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL divergence").

k1 is unbiased and may be negative for one token; k2 and k3 never are. k3 is unbiased as a value, but when it is put into
the reward the gradient it brings is not KL's: that is why k1 is the default there (docs/algorithms.md).
Log-ratios are logp - logp_ref; only exp's argument is clamped, to -+20.
"""

from torch import Tensor

from pipeline.tensors import safe_exp


def k1(log_ratio: Tensor) -> Tensor:
    """log_ratio itself."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log_ratio^2 / 2."""
    return log_ratio**2 / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio."""
    return safe_exp(-log_ratio) - 1 + log_ratio


IN_REWARD = {"k1": k1, "k3": k3}
"""What may stand in the reward: k2 there estimates neither KL nor its gradient."""

IN_LOSS = {"k2": k2, "k3": k3}
"""What may be a loss: the gradient of k1 is 0 on average, that of k2 is KL(policy || reference)'s, that of k3 KL(reference || policy)'s."""
