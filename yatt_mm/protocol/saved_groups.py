"""What is saved of the groups of a begun step: messages between controllers and the keeper, and their form as JSON. No
torch.

A sample's conversation and media are not in it: they are read again from the data set. Nor are the tokens: those are in
the group's record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataplane.core.refs import Ref
from yatt_mm.protocol.control import Slot
from yatt_mm.protocol.faults import Failures, Fault
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.step_meter import StepMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """One group, finished or cut off."""

    slot: Slot
    group: GroupRef
    """The record of its responses; without its media."""
    num_parts: int
    """The number of attempts that sampled its responses."""
    rewards: tuple[float, ...]
    """[G] the rewards so far; empty if it has none yet."""
    scores: tuple[Scores, ...]
    failures: tuple[Failures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShare:
    """What one controller has of a begun step."""

    groups: tuple[SavedGroup, ...]
    has_wrong_rewards: bool = False
    """True if a reward of any controller is out of `reward.range`."""
    meter: StepMeter
    """The metrics of the step until then."""


def group_to_json(saved: SavedGroup) -> str:
    """Return a group as text, without where its record is."""
    whole = asdict(saved)
    del whole["group"]["ref"], whole["group"]["media"]
    return json.dumps(whole)


def group_from_json(text: str, ref: Ref) -> SavedGroup:
    """Return the group that `group_to_json` wrote, whose record is now at `ref`."""
    whole = json.loads(text)
    group = whole["group"]
    return SavedGroup(
        slot=Slot(**whole["slot"]),
        group=GroupRef(
            slot=group["slot"],
            ref=ref,
            media=(),
            num_prompt_tokens=group["num_prompt_tokens"],
            lengths=tuple(group["lengths"]),
            policy_versions=tuple((low, high) for low, high in group["policy_versions"]),
            finish_reasons=tuple(group["finish_reasons"]),
        ),
        num_parts=whole["num_parts"],
        rewards=tuple(whole["rewards"]),
        scores=tuple(map(_scores, whole["scores"])),
        failures=tuple(Failures(**{**one, "fault": Fault(**one["fault"])}) for one in whole["failures"]),
    )


def together(shares: Sequence[SavedShare]) -> SavedShare:
    """Return several controllers' shares as one."""
    meter = StepMeter()
    for share in shares:
        meter.add(share.meter)
    return SavedShare(
        groups=tuple(group for share in shares for group in share.groups),
        has_wrong_rewards=any(share.has_wrong_rewards for share in shares),
        meter=meter,
    )


def _scores(one: dict[str, Any]) -> Scores:
    return Scores(
        source=one["source"],
        values=tuple(one["values"]),
        words=None if one["words"] is None else tuple(one["words"]),
        parts={name: tuple(values) for name, values in one["parts"].items()},
        answers=tuple(one["answers"]),
        votes=tuple(one["votes"]),
    )
