"""The prompts of the step under way, until its batch is full. Owned by the rendezvous.

Dealt out in rounds: deal the prompts that the sampling rule wants, replace those whose media are bad, answer and judge
all of them, count which groups have signal. Which prompts are used depends on the run's order and on the rewards alone,
never on who answers first or on how many controllers there are.

Or in a stream: as each group lands, its controller is dealt what the batch still needs; when it is full, groups that
are under way are dropped or carried over into the next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from yatt_mm.control.cursor import PromptCursor, Slot
from yatt_mm.sampling import SamplingRule, StepSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What all controllers are told at the end of a round."""

    is_full: bool
    """False when another round follows."""
    kept: tuple[int, ...] = ()
    """Positions of the groups to train on, once the batch is full."""
    num_prompts_used: int = 0
    """Prompts that the step has used so far."""
    num_rejected: int = 0
    """Groups without signal that were replaced."""
    carried: tuple[int, ...] = ()
    """Positions of the groups with which the next step begins."""


class Batches:
    """The steps' batches, one after the other."""

    def __init__(self, rule: SamplingRule, cursor: PromptCursor, *, expected_signal_frac: float = 1.0) -> None:
        self.cursor = cursor
        self.outcome: RoundOutcome | None = None
        """How the last stream was filled; None while it goes on."""
        self._rule = rule
        self._expected_signal_frac = expected_signal_frac
        self._step: StepSampling | None = None
        self._round: dict[int, int] = {}
        """Position -> sample number of the prompts dealt in this round."""
        self._dealt: dict[int, tuple[Slot, int | None]] = {}
        """Position -> prompt and controller, in a stream; what the last one carried over, between streams."""

    def deal(self, bad: Sequence[Sequence[int]]) -> list[list[Slot]]:
        """[controller] its further prompts. `bad`: [controller] sample numbers of its last share to leave out for good.

        The first call of a round deals what the batch still needs; each later one replaces the bad ones, for the
        controller that had them.
        """
        if self._step is None:
            in_rounds = replace(self._rule, deterministic=True)  # refilled only between rounds
            self._step = StepSampling(in_rounds, expected_signal_frac=self._expected_signal_frac)
        if self._round:
            wanted = [len(share) for share in bad]
        else:
            wanted = [len(range(c, self._step.num_wanted, len(bad))) for c in range(len(bad))]
        left_out = {index for share in bad for index in share}
        self.cursor.skipped.update(left_out)
        self._round = {position: index for position, index in self._round.items() if index not in left_out}
        slots = self.cursor.take(sum(wanted))
        self._round.update({slot.position: slot.index for slot in slots})
        return _in_turn(slots, wanted)

    def finish_round(self, landed: Sequence[Sequence[tuple[int, bool]]]) -> RoundOutcome:
        """`landed`: [controller] (position, has signal) of every group of the round."""
        assert self._step is not None
        groups = sorted(group for share in landed for group in share)
        assert [position for position, _ in groups] == sorted(self._round), "a group of the round is missing"
        self._step.start(sorted(self._round))
        self._round = {}
        for position, has_signal in groups:
            self._step.finish(position, has_signal=has_signal)
        if not self._step.is_done:
            return RoundOutcome(is_full=False)
        return self._take_outcome()

    def open(self, num_controllers: int) -> list[list[Slot]]:
        """[controller] the prompts with which a stream begins: those that it carried over, then new ones."""
        self.outcome = None
        carried, self._dealt = self._dealt, {}
        self._step = StepSampling(self._rule, carried=sorted(carried), expected_signal_frac=self._expected_signal_frac)
        shares: list[list[Slot]] = [[] for _ in range(num_controllers)]
        homeless = []
        for _, (slot, owner) in sorted(carried.items()):
            homeless.append(slot) if owner is None else shares[owner].append(slot)
        new = self.cursor.take(self._step.num_wanted)
        self._step.start(slot.position for slot in new)
        for i, slot in enumerate([*homeless, *new]):
            shares[i % num_controllers].append(slot)
        self._dealt = {slot.position: (slot, c) for c, share in enumerate(shares) for slot in share}
        return shares

    def land(self, controller: int, position: int, has_signal: bool | None) -> list[Slot]:
        """A group of the stream is judged, or with None cannot be had; the further prompts for its controller."""
        if self._step is None:
            return []  # it comes too late: the batch is full
        if has_signal is None:
            self.cursor.skipped.add(self._dealt[position][0].index)
            self._step.lose(position)
        else:
            self._step.finish(position, has_signal=has_signal)
        slots = self.cursor.take(self._step.num_wanted)
        self._step.start(slot.position for slot in slots)
        self._dealt.update({slot.position: (slot, controller) for slot in slots})
        if self._step.is_done:
            self._close()
        return slots

    def _close(self) -> None:
        self.outcome = self._take_outcome()
        self._dealt = {position: self._dealt[position] for position in self.outcome.carried}

    def _take_outcome(self) -> RoundOutcome:
        assert self._step is not None
        outcome = self._step.outcome()
        self._step = None
        self._expected_signal_frac = outcome.expected_signal_frac
        return RoundOutcome(
            is_full=True,
            kept=(*outcome.accepted, *outcome.fillers),
            num_prompts_used=outcome.num_prompts_used,
            num_rejected=len(outcome.rejected),
            carried=outcome.carried,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON), between steps."""
        carried = [dataclasses.asdict(slot) for slot, _ in self._dealt.values()]
        return {"cursor": self.cursor.state(), "expected_signal_frac": self._expected_signal_frac, "carried": carried}

    @classmethod
    def from_state(cls, rule: SamplingRule, state: dict[str, Any]) -> Batches:
        """The inverse of `state`; prompts that were carried over are answered from their beginning."""
        cursor = PromptCursor.from_state(state["cursor"])
        batches = cls(rule, cursor, expected_signal_frac=float(state.get("expected_signal_frac", 1.0)))
        slots = [Slot(**slot) for slot in state.get("carried", ())]
        batches._dealt = {slot.position: (slot, None) for slot in slots}
        return batches


def _in_turn(slots: Sequence[Slot], wanted: Sequence[int]) -> list[list[Slot]]:
    """Slots dealt to the controllers one by one, as long as each wants any."""
    left = list(wanted)
    shares: list[list[Slot]] = [[] for _ in left]
    coming = iter(slots)
    while any(left):
        for controller, count in enumerate(left):
            if count:
                shares[controller].append(next(coming))
                left[controller] -= 1
    return shares
