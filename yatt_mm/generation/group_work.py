"""A group on its way through the stages of a generation phase."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from yatt_mm.protocol.control import HELD_OUT, TRAIN, Prompt, ScoredGroup
from yatt_mm.protocol.faults import FUNCTION, Failures
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.saved_groups import SavedGroup


@dataclass(slots=True, kw_only=True)
class GroupWork:
    """One group on its way through the stages of a generation phase."""

    prompt: Prompt
    group: GroupRef | None = None
    """The record of the responses so far; None before the first are sampled."""
    num_parts: int = 0
    """The number of attempts that sampled its responses: the first one and each continuation."""
    rewards: list[float] = field(default_factory=list)
    """[G] the rewards so far."""
    scores: list[Scores] = field(default_factory=list)
    """The scores so far, of which the rewards are made."""
    failures: list[Failures] = field(default_factory=list)
    """Who gave some of the responses no score."""

    @property
    def is_answered(self) -> bool:
        """True when no response was cut off."""
        return self.group is not None and "abort" not in self.group.finish_reasons

    @property
    def is_judged(self) -> bool:
        """True when judges have scored the responses."""
        return any(scores.source != FUNCTION for scores in self.scores)

    @classmethod
    def of(cls, group: ScoredGroup) -> GroupWork:
        """Return a finished group as it was on its way."""
        return cls(
            prompt=group.prompt,
            group=group.group,
            rewards=list(group.rewards),
            scores=list(group.scores),
            failures=list(group.failures),
        )

    @classmethod
    def resumed(cls, prompt: Prompt, saved: SavedGroup) -> GroupWork:
        """Return a group that was saved, with its prompt made anew."""
        return cls(
            prompt=prompt,
            group=replace(saved.group, media=prompt.media),
            num_parts=saved.num_parts,
            rewards=list(saved.rewards),
            scores=list(saved.scores),
            failures=list(saved.failures),
        )

    def saved(self) -> SavedGroup:
        """Return what is saved of the group. It must have a record already."""
        assert self.group is not None
        return SavedGroup(
            slot=self.prompt.slot,
            group=replace(self.group, media=()),
            num_parts=self.num_parts,
            rewards=tuple(self.rewards),
            scores=tuple(self.scores),
            failures=tuple(self.failures),
        )

    def scored(self) -> ScoredGroup:
        """Return the group with its rewards. It must have them already."""
        assert self.group is not None
        return ScoredGroup(
            prompt=self.prompt,
            group=self.group,
            rewards=tuple(self.rewards),
            scores=tuple(self.scores),
            failures=tuple(self.failures),
        )


def prompt_seed(run_seed: int, prompt: Prompt, *, purpose: str = "") -> int:
    """Return 31 bits that depend on the run's seed, the prompt's sample, set and epoch, and the purpose."""
    slot = prompt.slot
    text = f"{run_seed} {slot.epoch} {slot.index} {purpose}".strip()
    if slot.set_name not in (TRAIN, HELD_OUT):
        text = f"{slot.set_name} {text}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
