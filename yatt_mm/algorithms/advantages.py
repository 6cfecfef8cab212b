"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.1), without torch: controllers compute them."""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6


def group_advantages(rewards_G: Sequence[float], *, normalize_std: bool = True, min_range: float = 0.0) -> list[float]:
    """Return [G] rewards minus the group's mean, divided by the group's standard deviation if `normalize_std`.

    A group of equal rewards has no signal (see `has_signal`): all its advantages are 0. Without the division this is
    the unbiased form of Dr. GRPO (arXiv 2503.20783).
    """
    mean = sum(rewards_G) / len(rewards_G)
    centred = [reward - mean for reward in rewards_G]
    if not has_signal(rewards_G, min_range=min_range):
        return [0.0] * len(centred)
    if not normalize_std:
        return centred
    std = math.sqrt(sum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def has_signal(rewards_G: Sequence[float], *, min_range: float = 0.0) -> bool:
    """Return True if the rewards of a group differ by more than `min_range`."""
    return max(rewards_G) - min(rewards_G) > min_range
