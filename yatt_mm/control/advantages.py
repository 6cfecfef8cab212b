"""The advantages of a step's batch: each controller computes those of its own groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from yatt_mm.algorithms.advantages import batch_statistics
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.algorithms.table import ALGORITHMS
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.protocol.control import ScoredGroup


def with_advantages(
    groups: Sequence[ScoredGroup], settings: AlgorithmSettings, rendezvous: RendezvousClient
) -> list[ScoredGroup]:
    """Return this controller's groups of a batch with their advantages. Waits for the other controllers if the
    algorithm needs the statistics of the whole batch."""
    algorithm, batch = ALGORITHMS[settings.name], None
    if "batch_statistics" in algorithm.needs:
        mine = [pair for group in groups for pair in zip(group.rewards, group.group.lengths, strict=True)]
        batch = batch_statistics(pair for part in rendezvous.gather(mine) for pair in part)
    return [replace(group, advantages=tuple(algorithm.advantage(group.rewards, batch, settings))) for group in groups]
