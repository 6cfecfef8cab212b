"""Generalised advantage estimation (GAE, arXiv 1506.02438) over the sampled tokens of a response, and whitening over
those of a step: training ranks compute them, in float64.

Axes: K = sampled tokens of one response, in their order. Tokens of prompts, images and tools are no steps of an
episode: the state after a sampled token is the one before the next sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

VARIANCE_EPSILON = 1e-8
ROUNDING = 1e-12
"""The variance, relative to the square of the mean, up to which values are all equal."""
Add = Callable[[np.ndarray], np.ndarray]
"""The type of a sum: an array -> the sum of those of all replicas."""


def token_rewards(score: float, num_tokens: int) -> np.ndarray:
    """Return [K] the reward of each token: the response's score at the last one, and 0 before."""
    rewards = np.zeros(num_tokens)
    rewards[-1:] = score
    return rewards


def gae(rewards_K: np.ndarray, values_K: np.ndarray, *, gamma: float, lam: float) -> np.ndarray:
    """Return [K] float64 advantages. `values_K` are those of the states before the tokens; the state after the last
    token has the value 0 (equations 11 to 16 of the paper)."""
    values = values_K.astype(np.float64)
    errors = rewards_K + gamma * np.append(values[1:], 0.0)[: len(values)] - values
    backwards = accumulate(errors[::-1].tolist(), lambda later, error: error + gamma * lam * later)
    return np.fromiter(backwards, np.float64, len(values))[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The mean and the sample variance of a value over all tokens of a step, of all replicas."""

    mean: float
    variance: float

    def whiten(self, values: np.ndarray) -> np.ndarray:
        """Return the values minus the mean, divided by the standard deviation."""
        return (values - self.mean) / np.sqrt(self.variance + VARIANCE_EPSILON)


def moments_of(columns: Sequence[np.ndarray], add: Add) -> list[Moments]:
    """Return the moments of each column; all have one value for each token of this replica."""
    num, *sums = add(np.array([len(columns[0]), *(column.sum() for column in columns)], dtype=np.float64))
    means = [total / max(1.0, num) for total in sums]
    squares = add(np.array([((column - mean) ** 2).sum() for column, mean in zip(columns, means)]))
    return [
        Moments(mean=float(mean), variance=float(total / max(1.0, num - 1)))
        for mean, total in zip(means, squares, strict=True)
    ]


def explained_variance(advantages: Moments, returns: Moments) -> float | None:
    """Return the share of the variance of the returns that the values explain: 1 if they are the returns, 0 if they are
    all the same, and less if they are worse than that. None if the returns do not vary. The advantages are those before
    whitening, which are returns minus values."""
    is_rounding = returns.variance <= ROUNDING * max(1.0, returns.mean**2)
    return None if is_rounding else 1 - advantages.variance / returns.variance
