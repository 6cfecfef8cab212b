"""The ledger of devices: who holds which, since when. Refuses what must never be, and tells what was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yatt_mm.common.errors import PlacementError
from yatt_mm.protocol.placement_model import MEMORY, Role, State, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpan:
    """A stretch of time in which a unit held its devices."""

    role: Role
    pool: str
    index: int
    devices: tuple[int, ...]
    state: State
    """Not asleep."""
    start_s: float
    """Seconds since the epoch."""
    end_s: float


class DeviceLedger:
    """State of every unit.

    Two awake roles never share a device. Training and rollout hold weights beside each other only while weights are
    published; nothing else is held beside somebody who is awake.
    """

    def __init__(self, states: Mapping[Unit, State]) -> None:
        """`states`: as the units came up, which may be more than the rules allow until the first phase."""
        self._states = dict(states)
        self._since: dict[Unit, float] = {}
        self._spans: list[LedgerSpan] = []

    def open(self, *, now_s: float) -> None:
        """The first phase has begun: spans are kept from now on."""
        self._since = self._since or dict.fromkeys(self._states, now_s)

    def state(self, unit: Unit) -> State:
        """As last told."""
        return self._states[unit]

    def check(self, unit: Unit, state: State) -> None:
        """Before a unit takes memory; giving some up is always allowed.

        Raises:
            PlacementError: somebody else holds one of its devices.
        """
        if MEMORY.index(state) <= MEMORY.index(self._states[unit]):
            return
        for other, held in self._states.items():
            shared = set(unit.devices) & set(other.devices)
            if other.role is unit.role or held is State.ASLEEP or not shared:
                continue
            is_publishing = {unit.role, other.role} == {Role.ROLLOUT, Role.TRAIN} and held is State.WEIGHTS_ONLY
            if not (is_publishing and state is State.WEIGHTS_ONLY):
                raise PlacementError(f"{unit} cannot be {state} on device(s) {sorted(shared)}: {other} is {held} there")

    def change(self, unit: Unit, state: State, *, now_s: float) -> None:
        """A unit is in another state now.

        Raises:
            PlacementError: as `check`.
        """
        self.check(unit, state)
        self._close(unit, now_s)
        self._states[unit] = state

    def take_spans(self, *, now_s: float) -> list[LedgerSpan]:
        """What was held since the last call, and by whom."""
        for unit in self._states:
            self._close(unit, now_s)
        spans, self._spans = self._spans, []
        return spans

    def _close(self, unit: Unit, now_s: float) -> None:
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
