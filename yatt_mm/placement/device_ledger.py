"""The ledger of devices: which unit holds which device, in which state and since when.

It refuses changes that would let two roles share a device, and records the spans of time in which devices were held.
It does not talk to the units; the coordinator does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yatt_mm.common.errors import PlacementError
from yatt_mm.protocol.placement_model import MEMORY, Role, State, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpan:
    """A span of time in which a unit held its devices in one state."""

    role: Role
    pool: str
    index: int
    devices: tuple[int, ...]
    state: State
    """`weights_only` or `awake`; sleeping units have no spans."""
    start_s: float
    """The start of the span in seconds since the epoch."""
    end_s: float


class DeviceLedger:
    """The state of every unit, and the rules about sharing devices.

    Two awake roles never share a device. Training and rollout may both hold their weights on a device while weights are
    published, both in the state `weights_only`. On a device of an awake unit, no other role holds anything.
    """

    def __init__(self, states: Mapping[Unit, State]) -> None:
        """Start from the `states` in which the units came up.

        Until the first phase they may hold more than the rules allow.
        """
        self._states = dict(states)
        self._units_on: dict[int, list[Unit]] = {}
        """[device] the units that use it, so that a change looks at no others."""
        for unit in states:
            for device in unit.devices:
                self._units_on.setdefault(device, []).append(unit)
        self._since: dict[Unit, float] = {}
        self._spans: list[LedgerSpan] = []

    def open(self, *, now_s: float) -> None:
        """Record spans from now on, because the first phase has begun. Later calls change nothing."""
        self._since = self._since or dict.fromkeys(self._states, now_s)

    def state(self, unit: Unit) -> State:
        """Return the unit's state after its last change."""
        return self._states[unit]

    def check(self, unit: Unit, state: State) -> None:
        """Check that a unit may enter `state`. A unit may always give up memory.

        Raises:
            PlacementError: a unit of another role holds one of its devices.
        """
        if MEMORY.index(state) <= MEMORY.index(self._states[unit]):
            return
        for other in dict.fromkeys(other for device in unit.devices for other in self._units_on[device]):
            held = self._states[other]
            if other.role is unit.role or held is State.ASLEEP:
                continue
            is_publishing = {unit.role, other.role} == {Role.ROLLOUT, Role.TRAIN} and held is State.WEIGHTS_ONLY
            if not (is_publishing and state is State.WEIGHTS_ONLY):
                shared = sorted(set(unit.devices) & set(other.devices))
                raise PlacementError(f"{unit} cannot be {state} on device(s) {shared}: {other} is {held} there")

    def change(self, unit: Unit, state: State, *, now_s: float) -> None:
        """Note that a unit is in another state now.

        Raises:
            PlacementError: `check` does not allow the state.
        """
        self.check(unit, state)
        self._close(unit, now_s)
        self._states[unit] = state

    def take_spans(self, *, now_s: float) -> list[LedgerSpan]:
        """Return the times since the last call in which units held devices. Those that still last are cut at
        `now_s`."""
        for unit in self._states:
            self._close(unit, now_s)
        spans, self._spans = self._spans, []
        return spans

    def _close(self, unit: Unit, now_s: float) -> None:
        """End the unit's span at `now_s` and start the next one there."""
        if not self._since:
            return
        state, since_s = self._states[unit], self._since[unit]
        self._since[unit] = now_s
        if state is State.ASLEEP or now_s <= since_s:
            return
        self._spans.append(
            LedgerSpan(
                role=unit.role,
                pool=unit.pool,
                index=unit.index,
                devices=unit.devices,
                state=state,
                start_s=since_s,
                end_s=now_s,
            )
        )
