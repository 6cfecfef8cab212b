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
class RewardFault:
    """Why the reward function gave a response no reward."""

    what: str
    """The error with its type, or what else was wrong."""
    where: str
    """The file and line that raised it, or the name of the function."""
    response: str
    """The beginning of the response."""
    trace: str = ""
    """The traceback inside the function's own code; empty if nothing was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group."""

    rewards: tuple[float, ...]
    """[G] the finite reward of each response."""
    num_errors: int
    """The number of responses without a reward, which score 0: the function raised, was late, or gave no number."""
    fault: RewardFault | None = None
    """Why the first of them has none."""
