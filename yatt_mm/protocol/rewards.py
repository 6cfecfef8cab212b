"""The messages between controllers and reward workers. Imported in controllers: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataplane.core.refs import Ref
from yatt_mm.common.conversation import Conversation
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
    conversation: Conversation
    """The turns that the policy read."""
    media: tuple[Ref, ...]
    """The patches of its media, in the order of the conversation."""
    max_tokens: int
    """The longest response that the run allows, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores that the reward function, or one judge, gave to the responses of a group."""

    source: str
    """`reward.function`, or `reward.judges.NAME`."""
    values: tuple[float, ...]
    """[G] one score per response, before its weight."""
    words: tuple[str, ...] | None = None
    """[G] what the judge wrote about each response; None if it is not kept."""
    parts: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """[G] by name the parts of the function's scores; see `GroupRewards`."""
    answers: tuple[str | None, ...] = ()
    """[G] the answers that the function read; see `GroupRewards`."""
    votes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group."""

    rewards: tuple[float, ...]
    """[G] the finite reward of each response."""
    num_errors: int
    """The number of responses without a reward, which score 0: the function raised, was late, or gave no number."""
    fault: Fault | None = None
    """Why the first of them has none."""
    parts: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """[G] by name the parts of each reward, before their weights; None for a response without this part."""
    answers: tuple[str | None, ...] = ()
    """[G] the answer that the function read in each response; None where it does not say."""
    votes: tuple[str, ...] = ()
    """[G] what each response answers, for a vote: the answer that the function read, or else a digest of the text."""
