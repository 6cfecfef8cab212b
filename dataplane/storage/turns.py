"""Turns of allocations that wait for room: when the others leave to one of them what becomes free.

Small allocations pass one that waits for more room than is free. So that they never pass it for ever, it has turns. A
turn that did not bring it its room, perhaps because the room can never become free, costs the others time for nothing:
they have twice as long before its next one.
"""

from dataclasses import dataclass

TURN_S = 2.0
"""The length of a turn, in seconds. An allocation has its first turn when it has waited as long."""


@dataclass(slots=True)
class _Waiting:
    """An allocation that waits."""

    turn_at: float
    """When it may have its next turn, in seconds of the monotonic clock."""
    pause_s: float
    """The seconds between its last turn, or its beginning, and its next one."""


class Turns:
    """The turns of all allocations of a store that wait for room. The store's lock guards them."""

    def __init__(self) -> None:
        self._waiting: dict[object, _Waiting] = {}
        self._holder: object | None = None
        """The allocation whose turn it is, or was last."""
        self._ends = 0.0

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._waiting

    def enter(self, ticket: object, now: float) -> None:
        """Note that an allocation waits for room."""
        if ticket not in self._waiting:
            self._waiting[ticket] = _Waiting(now + TURN_S, TURN_S)

    def leave(self, ticket: object) -> None:
        """Note that an allocation waits no more: it has its room, or it has failed."""
        del self._waiting[ticket]
        if self._holder is ticket:
            self._holder, self._ends = None, 0.0

    def of_another(self, ticket: object, now: float) -> float:
        """Return when the turn of another allocation ends, in seconds of the monotonic clock; 0.0 if no other has a
        turn now."""
        if now >= self._ends:
            self._pass_on(now)
        return self._ends if self._holder is not None and self._holder is not ticket else 0.0

    def _pass_on(self, now: float) -> None:
        """End the turn that is over, and begin that of the allocation which has waited longest for one."""
        if self._holder is not None:
            held = self._waiting[self._holder]
            held.pause_s *= 2
            held.turn_at = now + held.pause_s
        due = [ticket for ticket, waiting in self._waiting.items() if waiting.turn_at <= now]
        self._holder = min(due, key=lambda ticket: self._waiting[ticket].turn_at, default=None)
        self._ends = now + TURN_S if self._holder is not None else 0.0
