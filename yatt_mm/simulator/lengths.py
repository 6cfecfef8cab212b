"""Draws the numbers of tokens of responses and verdicts: a lognormal body, a Pareto tail, correlation inside a
prompt."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from yatt_mm.simulator.config import LengthSection


def draw_lengths(lengths: LengthSection, shared: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return [...] whole numbers of tokens, at least 1 and at most `max_tokens`.

    Args:
        lengths: the distribution.
        shared: [...] standard normal numbers, equal for all samples of a prompt.
        own: [...] standard normal numbers, one per sample.
    """
    correlation = lengths.prompt_correlation.value
    score = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    tokens = lengths.median.value * np.exp(lengths.sigma.value * score)
    tail_frac = lengths.tail_frac.value
    if tail_frac > 0:
        beyond = 0.5 * _erfc(score / math.sqrt(2))  # the share of samples that are longer
        in_tail = beyond < tail_frac
        if in_tail.any():
            start = lengths.median.value * math.exp(lengths.sigma.value * _normal_quantile(1 - tail_frac))
            with np.errstate(over="ignore"):  # the result is cut off below
                factor = (tail_frac / np.maximum(beyond[in_tail], 1e-12)) ** (1 / lengths.tail_alpha.value)
            tokens[in_tail] = start * factor
    return np.clip(np.rint(tokens), 1, lengths.max_tokens.value).astype(np.int64)


def _erfc(values: np.ndarray) -> np.ndarray:
    result: np.ndarray[Any, Any] = np.frompyfunc(math.erfc, 1, 1)(values).astype(float)
    return result


def _normal_quantile(share: float) -> float:
    """Return the value below which a share of the standard normal distribution is (bisection)."""
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        if 1 - 0.5 * math.erfc(middle / math.sqrt(2)) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
