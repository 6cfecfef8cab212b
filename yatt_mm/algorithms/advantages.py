"""Advantages of the responses to one prompt, without torch: controllers compute them.

An advantage is a function of the group's rewards, of the whole batch's statistics where it needs them, and of the
settings. G is the number of responses to the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from yatt_mm.algorithms.settings import AlgorithmSettings

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """The rewards of all sampled tokens of a step's batch, of all controllers. A token has its response's reward."""

    mean: float
    std: float
    """The sample standard deviation over the tokens."""
    range: float
    """The highest reward minus the lowest one."""


def batch_statistics(responses: Iterable[tuple[float, int]]) -> BatchStatistics:
    """Return the statistics of (reward, number of tokens) of all responses. Their order makes no difference."""
    counted = [(reward, num) for reward, num in responses if num]
    num_tokens = sum(num for _, num in counted)
    if not num_tokens:
        return BatchStatistics(mean=0.0, std=0.0, range=0.0)
    mean = math.fsum(reward * num for reward, num in counted) / num_tokens
    squares = math.fsum((reward - mean) ** 2 * num for reward, num in counted)
    rewards = [reward for reward, _ in counted]
    return BatchStatistics(
        mean=mean, std=math.sqrt(squares / max(1, num_tokens - 1)), range=max(rewards) - min(rewards)
    )


def of_group(rewards_G: Sequence[float], batch: BatchStatistics | None, settings: AlgorithmSettings) -> list[float]:
    """Return [G] rewards minus the group's mean, divided by the group's standard deviation if
    `settings.normalize_std` (GRPO, arXiv 2402.03300, section 4.1.1)."""
    return group_advantages(rewards_G, normalize_std=settings.normalize_std, min_range=settings.min_reward_range)


def centred(rewards_G: Sequence[float], batch: BatchStatistics | None, settings: AlgorithmSettings) -> list[float]:
    """Return [G] rewards minus the group's mean (Dr. GRPO, arXiv 2503.20783)."""
    return group_advantages(rewards_G, normalize_std=False, min_range=settings.min_reward_range)


def leave_one_out(
    rewards_G: Sequence[float], batch: BatchStatistics | None, settings: AlgorithmSettings
) -> list[float]:
    """Return [G] each reward minus the mean of the others in its group (RLOO, arXiv 2402.14740)."""
    num = len(rewards_G)
    return [value * num / (num - 1) for value in centred(rewards_G, batch, settings)]


def of_batch(rewards_G: Sequence[float], batch: BatchStatistics | None, settings: AlgorithmSettings) -> list[float]:
    """Return [G] rewards minus the batch's mean, divided by the batch's standard deviation (REINFORCE++, arXiv
    2501.03262: global advantage normalisation). Both are over tokens, as in the paper's formula.

    A batch of equal rewards has no signal: all its advantages are 0.
    """
    assert batch is not None
    if batch.range <= settings.min_reward_range:
        return [0.0] * len(rewards_G)
    return [(reward - batch.mean) / (batch.std + STD_EPSILON) for reward in rewards_G]


def scores_alone(rewards_G: Sequence[float], batch: BatchStatistics | None, settings: AlgorithmSettings) -> list[float]:
    """Return [G] the rewards as they are: training ranks make the advantages of them and of the critic's values (PPO,
    arXiv 1707.06347; see `gae.py`)."""
    return list(rewards_G)


def group_advantages(rewards_G: Sequence[float], *, normalize_std: bool = True, min_range: float = 0.0) -> list[float]:
    """Return [G] rewards minus the group's mean, divided by the group's standard deviation if `normalize_std`.

    A group of equal rewards has no signal (see `has_signal`): all its advantages are 0.
    """
    mean = sum(rewards_G) / len(rewards_G)
    centred = [reward - mean for reward in rewards_G]
    if not has_signal(rewards_G, min_range=min_range):
        return [0.0] * len(centred)
    if not normalize_std:
        return centred
    std = math.sqrt(sum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """Return DAPO's penalty for a response of `length` tokens, from 0 to -1: it begins `buffer` tokens before
    `max_tokens` and falls linearly (arXiv 2503.14476, equation 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))


def has_signal(rewards_G: Sequence[float], *, min_range: float = 0.0) -> bool:
    """Return True if the rewards of a group differ by more than `min_range`."""
    return max(rewards_G) - min(rewards_G) > min_range
