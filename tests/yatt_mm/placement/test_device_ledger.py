"""Tests of the ledger of devices: the changes that it refuses, and the spans that it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.common.errors import PlacementError
from yatt_mm.placement.device_ledger import DeviceLedger
from yatt_mm.protocol.placement_model import MEMORY, Engines, Phase, Role, State, full_colocation, partial_colocation

FULL = full_colocation(num_devices=2, rollout=Engines(num=2), judges={"judge": Engines(num=2)})
PARTIAL = partial_colocation(num_devices=3, rollout=Engines(num=3), judges={"judge": Engines(num=3)})


def asleep(placement=FULL) -> DeviceLedger:  # type: ignore[no-untyped-def]
    ledger = DeviceLedger(dict.fromkeys(placement.units, State.ASLEEP))
    ledger.open(now_s=0.0)
    return ledger


def test_two_awake_roles_never_share_a_device() -> None:
    ledger = asleep()
    engine, judge, rank = (FULL.of_role(role)[1] for role in Role)
    ledger.change(engine, State.AWAKE, now_s=1.0)
    for other in (judge, rank):
        with pytest.raises(PlacementError, match=r"cannot be awake on device\(s\) \[1\]: engine 1 is awake there"):
            ledger.change(other, State.AWAKE, now_s=2.0)
    ledger.change(FULL.of_role(Role.TRAIN)[0], State.AWAKE, now_s=2.0)


def test_weights_of_training_and_rollout_may_share_a_device_and_of_no_other_roles() -> None:
    ledger = asleep()
    engine, judge, rank = (FULL.of_role(role)[0] for role in Role)
    ledger.change(rank, State.WEIGHTS_ONLY, now_s=1.0)
    ledger.change(engine, State.WEIGHTS_ONLY, now_s=1.0)
    with pytest.raises(PlacementError, match="engine 0 of judge judge cannot be weights_only"):
        ledger.change(judge, State.WEIGHTS_ONLY, now_s=1.0)
    with pytest.raises(PlacementError, match="training rank 0 cannot be awake"):
        ledger.change(rank, State.AWAKE, now_s=2.0)


def test_every_phase_can_be_entered_from_every_other_if_memory_is_given_up_first() -> None:
    in_turn = [phase for phase in Phase if phase is not Phase.GENERATION]
    for placement, phases in ((FULL, in_turn), (PARTIAL, list(Phase))):
        for before in phases:
            for after in phases:
                ledger = DeviceLedger(placement.wanted(before, [0]))
                wanted = placement.wanted(after, [0])
                rise = {unit: MEMORY.index(wanted[unit]) - MEMORY.index(ledger.state(unit)) for unit in wanted}
                for unit in sorted(wanted, key=lambda unit: rise[unit]):
                    ledger.change(unit, wanted[unit], now_s=1.0)


@given(cells=st.sets(st.integers(0, 2)))
def test_a_divided_generation_phase_has_one_role_on_every_device(cells: set[int]) -> None:
    wanted = PARTIAL.wanted(Phase.GENERATION, cells)
    for device in range(3):
        awake = {unit.role for unit, state in wanted.items() if device in unit.devices and state is State.AWAKE}
        assert awake == {Role.ROLLOUT if device in cells else Role.GENRM}


def test_in_full_colocation_engines_lie_one_after_another_each_on_its_own_devices() -> None:
    placement = full_colocation(
        num_devices=4, rollout=Engines(num=2, tp=2), judges={"a": Engines(num=1, tp=2), "b": Engines(num=2)}
    )
    assert placement.devices(Role.ROLLOUT) == ((0, 1), (2, 3))
    assert placement.devices(Role.GENRM) == ((0, 1), (2,), (3,))
    assert placement.devices(Role.TRAIN) == ((0,), (1,), (2,), (3,))


def test_spans_tell_who_held_what() -> None:
    ledger = asleep()
    engine = FULL.of_role(Role.ROLLOUT)[0]
    ledger.change(engine, State.AWAKE, now_s=1.0)
    (first,) = ledger.take_spans(now_s=3.0)
    ledger.change(engine, State.ASLEEP, now_s=4.0)
    (second,) = ledger.take_spans(now_s=9.0)
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == (1.0, 3.0, 3.0, 4.0)
    assert first.devices == (0,) and first.state is State.AWAKE
