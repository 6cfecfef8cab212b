"""The prompts of the step under way: dealt out in rounds, until the batch is full. Owned by the rendezvous.

A round: deal the prompts that the sampling rule wants, replace those whose media are bad, answer and judge all of them,
count which groups have signal. Which prompts are used depends on the run's order and on the rewards alone, never on
who answers first or on how many controllers there are.
"""

from __future__ import annotations

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


class Batches:
    """The steps' batches, one after the other."""

    def __init__(self, rule: SamplingRule, cursor: PromptCursor, *, expected_signal_frac: float = 1.0) -> None:
        self.cursor = cursor
        self._rule = replace(rule, deterministic=True)  # refilled only between rounds
        self._expected_signal_frac = expected_signal_frac
        self._step: StepSampling | None = None
        self._round: dict[int, int] = {}
        """Position -> sample number of the prompts dealt in this round."""

    def deal(self, bad: Sequence[Sequence[int]]) -> list[list[Slot]]:
        """[controller] its further prompts. `bad`: [controller] sample numbers of its last share to leave out for good.

        The first call of a round deals what the batch still needs; each later one replaces the bad ones, for the
        controller that had them.
        """
        if self._step is None:
            self._step = StepSampling(self._rule, expected_signal_frac=self._expected_signal_frac)
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
        outcome = self._step.outcome()
        self._step = None
        self._expected_signal_frac = outcome.expected_signal_frac
        return RoundOutcome(
            is_full=True,
            kept=(*outcome.accepted, *outcome.fillers),
            num_prompts_used=outcome.num_prompts_used,
            num_rejected=len(outcome.rejected),
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON), between steps."""
        return {"cursor": self.cursor.state(), "expected_signal_frac": self._expected_signal_frac}

    @classmethod
    def from_state(cls, rule: SamplingRule, state: dict[str, Any]) -> Batches:
        """The inverse of `state`."""
        cursor = PromptCursor.from_state(state["cursor"])
        return cls(rule, cursor, expected_signal_frac=float(state.get("expected_signal_frac", 1.0)))


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
