"""The KL divergence of the policy from a reference: estimators from sampled tokens, as functions of per-token tensors,
and the weight that moves it towards a target.

Axes: K = sampled tokens. A token x was sampled from (nearly) the policy pi. With the log-ratio d = log pi(x) -
log ref(x), the mean over x of k1 and of k3 is KL(pi || ref), and that of k2 is near it. The names are those of John
Schulman's note "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from yatt_mm.algorithms.settings import KlEstimator

if TYPE_CHECKING:
    import torch


def k1(difference: torch.Tensor) -> torch.Tensor:
    """Return [K] d. It may be negative. Its gradient is that of the log-probability, whose mean over tokens of the
    policy is 0: in a loss it teaches nothing. In a reward it is what makes the whole reward minus the divergence."""
    return difference


def k2(difference: torch.Tensor) -> torch.Tensor:
    """Return [K] d^2 / 2. The mean of its gradient is that of KL(pi || ref)."""
    return difference.square() / 2


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Return [K] exp(-d) - 1 + d (GRPO, arXiv 2402.03300, equation 4). It has no bias, little variance, and is never
    negative. The mean of its gradient is that of KL(ref || pi)."""
    return (-difference).exp() - 1 + difference


ESTIMATORS: dict[KlEstimator, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

ADAPTED_BY = 0.1
"""The share of the error by which the weight changes (arXiv 1909.08593, section 2.2)."""
MAX_ERROR = 0.2
"""The largest error that counts, as a share of the target."""


def adapted(coef: float, divergence: float, *, target: float) -> float:
    """Return the weight of the next step: larger if the divergence was above its target, smaller if it was below
    (arXiv 1909.08593, section 2.2)."""
    error = max(-MAX_ERROR, min(MAX_ERROR, divergence / target - 1))
    return coef * (1 + ADAPTED_BY * error)
