"""The advantages of a step's batch: each controller computes those of its own groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from yatt_mm.algorithms.advantages import batch_statistics, overlong_penalty
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.algorithms.table import ALGORITHMS
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.protocol.control import ScoredGroup


def with_advantages(
    groups: Sequence[ScoredGroup],
    settings: AlgorithmSettings,
    rendezvous: RendezvousClient,
    *,
    max_tokens: int,
    divergences: Mapping[int, Sequence[float]] | None = None,
    kl_coef: float = 0.0,
) -> list[ScoredGroup]:
    """Return this controller's groups of a batch with their advantages. Waits for the other controllers if the
    algorithm needs the statistics of the whole batch. `max_tokens`: the longest response that the run allows.
    `divergences`: [position] [G] those of the responses from the reference, of which they lose `kl_coef` times."""
    algorithm, batch = ALGORITHMS[settings.name], None
    rewards = [_shaped(group, settings, max_tokens) for group in groups]
    if divergences is not None:
        far = [divergences[group.prompt.slot.position] for group in groups]
        rewards = [
            [reward - kl_coef * one for reward, one in zip(*of_group, strict=True)]
            for of_group in zip(rewards, far, strict=True)
        ]
    if "batch_statistics" in algorithm.needs:
        lengths = (length for group in groups for length in group.group.lengths)
        mine = list(zip((reward for of_group in rewards for reward in of_group), lengths, strict=True))
        batch = batch_statistics(pair for part in rendezvous.gather(mine) for pair in part)
    return [
        replace(group, advantages=tuple(algorithm.advantage(of_group, batch, settings)))
        for group, of_group in zip(groups, rewards, strict=True)
    ]


def _shaped(group: ScoredGroup, settings: AlgorithmSettings, max_tokens: int) -> Sequence[float]:
    """Return [G] the rewards, less what long responses lose."""
    if not settings.overlong_buffer:
        return group.rewards
    return [
        reward
        + settings.overlong_penalty * overlong_penalty(length, max_tokens=max_tokens, buffer=settings.overlong_buffer)
        for reward, length in zip(group.rewards, group.group.lengths, strict=True)
    ]
