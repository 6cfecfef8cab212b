"""The messages between controllers and reward workers. Imported in controllers: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yatt_mm.protocol.rollout import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTask:
    """A finished group, with what the reward function needs to score its responses."""

    group: GroupRef
    answer: str
    fields: Mapping[str, Any]
    """The sample's JSON member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group."""

    rewards: tuple[float, ...]
    """[G] the finite reward of each response."""
    num_errors: int
    """The number of responses on which the reward function raised (scored 0)."""
