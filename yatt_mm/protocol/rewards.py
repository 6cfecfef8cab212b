"""The messages between controllers and reward workers. Imported in controllers: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.rollout import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTask:
    """A finished group, with what the reward function needs to score its responses."""

    group: GroupRef
    function: str
    """The path of the reward function."""
    answer: str
    fields: Mapping[str, Any]
    """The sample's JSON member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores that the reward function, or one judge, gave to the responses of a group."""

    source: str
    """`reward.function`, or `reward.judges.NAME`."""
    values: tuple[float, ...]
    """[G] one score per response, before its weight."""
    words: tuple[str, ...] | None = None
    """[G] what the judge wrote about each response; None if it is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group."""

    rewards: tuple[float, ...]
    """[G] the finite reward of each response."""
    num_errors: int
    """The number of responses without a reward, which score 0: the function raised, was late, or gave no number."""
    fault: Fault | None = None
    """Why the first of them has none."""
