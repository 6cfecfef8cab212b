"""Tests of the coordinator: roles take turns, cells move while both roles work, and requests get engines. The workers
only record their states.

The whole runs in tests/yatt_mm/whole_runs have real workers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.held_memory import StateReport
from yatt_mm.placement.coordinator import Coordinator
from yatt_mm.placement.policy import Bounds, Split
from yatt_mm.placement.rebalancer import CellDivision, Rebalancer
from yatt_mm.placement.state_changes import StateChange, StateChanges
from yatt_mm.protocol.placement_model import (
    MEMORY,
    Engines,
    Phase,
    Placement,
    Role,
    State,
    Unit,
    full_colocation,
    partial_colocation,
)

FULL = full_colocation(num_devices=2, rollout=Engines(num=2), judges={"judge": Engines(num=2)})
PARTIAL = partial_colocation(num_devices=2, rollout=Engines(num=2), judges={"judge": Engines(num=2)})
DIVISION = CellDivision(
    first=Split(rollout=1, genrm=1), bounds=Bounds(max_rollout=2, max_genrm=2), is_dynamic=True, decide_every_s=0.01
)


class Method:
    """A fake of a method of an actor's handle."""

    def __init__(self, body: Callable[..., Awaitable[Any]]) -> None:
        self.remote = body


class Worker:
    """A fake worker that records its states. A `late` worker never replies."""

    def __init__(self, log: list[tuple[str, State]], unit: Unit, *, late: bool = False) -> None:
        async def set_state(state: State) -> StateReport:
            if late:
                await asyncio.Event().wait()
            log.append((str(unit), state))
            return StateReport(held_bytes=1000 + MEMORY.index(state))

        self.set_state = Method(set_state)


def make(
    placement: Placement,
    log: list[tuple[str, State]],
    *,
    late: str = "",
    division: CellDivision | None = None,
    num_controllers: int = 2,
    agents: Sequence[Any] = (),
) -> Coordinator:
    workers = {unit: Worker(log, unit, late=str(unit) == late) for unit in placement.units}
    return Coordinator(
        placement=placement,
        changes=StateChanges(placement, workers, agents=agents, deadline_s=0.5 if late else 30.0),
        states={unit: State.ASLEEP if unit.role is Role.GENRM else State.AWAKE for unit in placement.units},
        requests_per_engine={"rollout": 2, "judge": 2},
        num_controllers=num_controllers,
        division=division,
    )


def test_roles_that_give_memory_up_go_first() -> None:
    async def run() -> list[tuple[str, State]]:
        log: list[tuple[str, State]] = []
        coordinator = make(FULL, log)
        await coordinator.enter(Phase.ROLLOUT, 1, True)
        assert {name for name, _ in log} == {"training rank 0", "training rank 1"}, "engines are awake already"
        log.clear()
        entered = await coordinator.enter(Phase.JUDGE, 1, True)
        assert entered.awake == {"rollout": (), "judge": (0, 1)}
        return log

    log = asyncio.run(run())
    assert [state for _, state in log] == [State.ASLEEP, State.ASLEEP, State.AWAKE, State.AWAKE]


class Agent:
    """A fake agent of a host that records what it is asked."""

    def __init__(self, host: int, log: list[tuple[int, list[str], State]]) -> None:
        async def set_state(names: list[str], state: State, deadline_s: float) -> list[StateChange]:
            log.append((host, names, state))
            return [
                StateChange(report=StateReport(held_bytes=1, moved=f"{name} on {host}"), seconds=1.0) for name in names
            ]

        self.set_state = Method(set_state)


def test_the_units_of_a_host_are_told_by_one_call_to_its_agent() -> None:
    async def run() -> list[tuple[int, list[str], State]]:
        log: list[tuple[int, list[str], State]] = []
        coordinator = make(replace(FULL, devices_per_host=1), [], agents=[Agent(host, log) for host in (0, 1)])
        await coordinator.enter(Phase.ROLLOUT, 1, True)
        log.clear()
        entered = await coordinator.enter(Phase.TRAIN, 1, True)
        assert entered.awake == {"rollout": (), "judge": ()}
        assert sorted(entered.moved) == [
            "engine 0 on 0",
            "engine 1 on 1",
            "training rank 0 on 0",
            "training rank 1 on 1",
        ]
        entered = await coordinator.enter(Phase.PUBLISH, 1, True)
        return log

    states = {State.ASLEEP: "engine", State.AWAKE: "training rank"}
    assert asyncio.run(run()) == [
        *((host, [f"{name} {host}"], state) for state, name in states.items() for host in (0, 1)),
        *((host, [f"{name} {host}"], State.WEIGHTS_ONLY) for name in ("training rank", "engine") for host in (0, 1)),
    ]


def test_a_worker_that_does_not_change_is_named_in_time() -> None:
    async def run() -> None:
        coordinator = make(FULL, [], late="engine 1")
        await coordinator.enter(Phase.ROLLOUT, 1, True)
        with pytest.raises(WorkerError, match=r"engine 1 did not finish becoming asleep in 0\.5 s"):
            await coordinator.enter(Phase.TRAIN, 1, True)

    asyncio.run(run())


def test_requests_wait_for_room_and_those_of_an_earlier_phase_are_sent_away() -> None:
    async def run() -> None:
        coordinator = make(FULL, [])
        number = (await coordinator.enter(Phase.ROLLOUT, 1, True)).number
        assert await coordinator.acquire(number, "rollout", 0, 5) == [0, 1, 0, 1]
        waiting = asyncio.ensure_future(coordinator.acquire(number, "rollout", 0, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        await coordinator.want(number, "rollout", 0, 1, [(1, 1, 1)])
        assert await waiting == [1]
        await coordinator.enter(Phase.TRAIN, 1, True)
        assert await coordinator.acquire(number, "rollout", 0, 1) == []

    asyncio.run(run())


async def second_waits(coordinator: Coordinator) -> tuple[int, asyncio.Future[list[int]]]:
    """Begin a phase in which controller 0 has as many requests as the engines take and controller 1 waits. Return the
    phase's number and the future of controller 1's request."""
    number = (await coordinator.enter(Phase.ROLLOUT, 1, True)).number
    await coordinator.acquire(number, "rollout", 0, 4)
    waiting = asyncio.ensure_future(coordinator.acquire(number, "rollout", 1, 3))
    await asyncio.sleep(0)
    return number, waiting


def test_a_request_that_still_waits_as_a_phase_ends_is_answered() -> None:
    async def run() -> None:
        coordinator = make(FULL, [])
        _, waiting = await second_waits(coordinator)
        again = (await coordinator.enter(Phase.ROLLOUT, 2, True)).number
        assert await asyncio.wait_for(waiting, 1) == []
        assert await coordinator.acquire(again, "rollout", 1, 1) == [0]

    asyncio.run(run())


@pytest.mark.parametrize("num_controllers", [1, 2])
def test_requests_go_to_engines_on_the_controllers_host_and_to_hosts_without_one(num_controllers: int) -> None:
    async def run() -> list[list[int]]:
        coordinator = make(replace(FULL, devices_per_host=1), [], num_controllers=num_controllers)
        entry = await coordinator.enter(Phase.ROLLOUT, 1, True)
        found = [await coordinator.acquire(entry.number, "rollout", c, 3) for c in range(num_controllers)]
        await coordinator.enter(Phase.TRAIN, 1, True)
        return found

    assert asyncio.run(run()) == ([[0, 1, 0]] if num_controllers == 1 else [[0, 0], [1, 1]])


def test_a_wish_that_is_taken_back_is_answered() -> None:
    async def run() -> None:
        coordinator = make(FULL, [])
        number, waiting = await second_waits(coordinator)
        await coordinator.want(number, "rollout", 1, 0)
        assert await waiting == []

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def judge_alone(coordinator: Coordinator, number: int, *, num_engines: int) -> None:
    """Leave nothing to sample, and more to judge than the judges' engines have places for. Wait until the judges have
    `num_engines` engines."""
    engines = await coordinator.acquire(number, "judge", 0, 9)
    await asyncio.sleep(0.02)
    await coordinator.want(number, "judge", 0, 9 - len(engines), [(engines[0], 1, 1)])
    await until(lambda: len(coordinator._pools["judge"].awake) == num_engines)


def test_cells_move_to_the_role_with_requests_waiting_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rebalancer, "note_move", lambda self, seconds: None)  # however long this machine takes for one

    async def run() -> None:
        coordinator = make(PARTIAL, [], division=DIVISION)
        number = (await coordinator.enter(Phase.GENERATION, 1, True)).number
        assert await coordinator.acquire(number, "rollout", 0, 5) == [0, 0]
        await asyncio.sleep(1.5)  # until there is something to judge: much longer than a move takes
        await coordinator.want(number, "rollout", 0, 0, [(0, 2, 2)])
        await judge_alone(coordinator, number, num_engines=2)
        entered = await coordinator.enter(Phase.TRAIN, 1, True)
        assert entered.awake == {"rollout": (), "judge": ()}
        assert [decision["split"] for decision in (await coordinator.take_report()).decisions] == ["1+1", "0+2"]

        # In the next step the judges' cell is lent for about as long, and comes back for the first answer.
        number = (await coordinator.enter(Phase.GENERATION, 2, True)).number
        assert await coordinator.acquire(number, "rollout", 0, 5) == [0, 0]
        assert await coordinator.acquire(number, "rollout", 0, 3) == [1, 1]
        asking = asyncio.ensure_future(coordinator.acquire(number, "judge", 0, 1))
        await until(lambda: bool(coordinator._pools["judge"].awake))
        (engine,) = await asking
        await coordinator.want(number, "judge", 0, 0, [(engine, 1, 1)])
        running = [(e, coordinator._pools["rollout"].running(e)) for e in (0, 1)]
        await coordinator.want(number, "rollout", 0, 0, [(e, count, count) for e, count in running])
        await judge_alone(coordinator, number, num_engines=2)
        await coordinator.enter(Phase.TRAIN, 2, True)
        report = await coordinator.take_report()
        assert [decision["split"] for decision in report.decisions] == ["1+1", "2+0", "1+1", "0+2"]
        assert re.search(r"GenRM has nothing to do for [\d.]+ s", report.decisions[1]["reason"])
        assert report.metrics["placement/num_moves"] == 3
        assert 0 < report.metrics["placement/rollout_devices"] < 2
        assert report.metrics["placement/rollout_awake_bytes_max"] == 1002
        assert report.metrics["placement/genrm_asleep_bytes_max"] == 1000

    asyncio.run(run())


def test_what_a_move_would_cost_too_much_for_is_told_once() -> None:
    async def run() -> None:
        coordinator = make(PARTIAL, [], division=DIVISION)
        coordinator._mover.note_move(1000.0)  # type: ignore[union-attr]
        number = (await coordinator.enter(Phase.GENERATION, 1, True)).number
        engines = await coordinator.acquire(number, "judge", 0, 5)
        await asyncio.sleep(0.02)
        await coordinator.want(number, "judge", 0, 3, [(engines[0], 1, 1)])
        await until(lambda: len(coordinator._usage._decisions) > 1)
        await asyncio.sleep(0.1)  # ten more decisions, of which nothing is told
        await coordinator.enter(Phase.TRAIN, 1, True)
        planned, refused = (await coordinator.take_report()).decisions
        assert (planned["split"], refused["split"]) == ("1+1", "1+1")
        assert "0+2 saves about" in refused["reason"] and "moving costs 900 s" in refused["reason"]

    asyncio.run(run())


def test_a_move_that_was_slow_by_chance_is_forgotten() -> None:
    """Test that a slow move is forgotten. Otherwise the placement policy would never move again, and so never find out
    that moves are fast."""

    async def run() -> None:
        coordinator = make(PARTIAL, [], division=DIVISION)
        coordinator._mover.note_move(1000.0)  # type: ignore[union-attr]
        for step in range(200):
            await coordinator.enter(Phase.GENERATION, step, True)
            await coordinator.enter(Phase.TRAIN, step, True)
        number = (await coordinator.enter(Phase.GENERATION, 200, True)).number
        await judge_alone(coordinator, number, num_engines=2)
        await coordinator.enter(Phase.TRAIN, 200, True)

    asyncio.run(run())


def test_engines_over_several_devices_move_as_cells_and_are_counted_in_devices() -> None:
    """Test with cells of two devices, each of which holds one engine of the policy or two of the judge."""
    placement = partial_colocation(num_devices=4, rollout=Engines(num=2, tp=2), judges={"judge": Engines(num=4)})
    assert placement.cells == ((0, 1), (2, 3))
    assert [unit.devices for unit in placement.in_cell(1, Role.ROLLOUT)] == [(2, 3)]
    assert [unit.devices for unit in placement.in_cell(1, Role.GENRM)] == [(2,), (3,)]

    async def run() -> None:
        log: list[tuple[str, State]] = []
        coordinator = make(placement, log, division=DIVISION)
        began_s = time.monotonic()
        entered = await coordinator.enter(Phase.GENERATION, 1, True)
        assert entered.awake == {"rollout": (0,), "judge": (2, 3)}
        log.clear()
        await judge_alone(coordinator, entered.number, num_engines=4)
        assert log[0] == ("engine 0", State.ASLEEP)
        assert sorted(log[1:]) == [("engine 0 of judge judge", State.AWAKE), ("engine 1 of judge judge", State.AWAKE)]
        await asyncio.sleep(4 * (time.monotonic() - began_s))  # for most of the phase the judge has them all
        await coordinator.enter(Phase.TRAIN, 1, True)
        metrics = (await coordinator.take_report()).metrics
        assert 3 < metrics["placement/genrm_devices"] <= 4
        assert 0 <= metrics["placement/rollout_devices"] < 1

    asyncio.run(run())


def test_a_judge_elsewhere_is_awake_beside_all_devices_that_answer() -> None:
    placement = partial_colocation(num_devices=2, rollout=Engines(num=2), judges={"judge": Engines(num=3, tp=0)})

    async def run() -> None:
        division = CellDivision(first=Split(rollout=2, genrm=0), bounds=DIVISION.bounds, is_dynamic=False)
        coordinator = make(placement, [], division=division)
        entered = await coordinator.enter(Phase.GENERATION, 1, True)
        assert entered.awake == {"rollout": (0, 1), "judge": (0, 1, 2)}
        assert await coordinator.acquire(entered.number, "judge", 0, 1) == [0]
        await coordinator.enter(Phase.GENERATION, 2, True)
        await coordinator.enter(Phase.TRAIN, 2, True)
        report = await coordinator.take_report()
        assert report.metrics["placement/genrm_devices"] == 0
        assert report.metrics["placement/rollout_devices"] == pytest.approx(2)

    asyncio.run(run())


def test_no_two_roles_are_awake_on_a_device_at_any_time() -> None:
    async def run() -> None:
        coordinator = make(PARTIAL, [], division=DIVISION)
        for step in range(3):
            number = (await coordinator.enter(Phase.GENERATION, step, True)).number
            (engine, *_) = await coordinator.acquire(number, "rollout", 0, 1)
            await coordinator.want(number, "rollout", 0, 0, [(engine, 1, 1)])
            await judge_alone(coordinator, number, num_engines=2)
            await coordinator.enter(Phase.TRAIN, step, True)
            await coordinator.enter(Phase.PUBLISH, step, True)
        spans = [span for span in (await coordinator.take_report()).spans if span.state is State.AWAKE]
        for i, span in enumerate(spans):
            for other in spans[i + 1 :]:
                if span.role is not other.role and set(span.devices) & set(other.devices):
                    assert span.end_s <= other.start_s or other.end_s <= span.start_s

    asyncio.run(run())


def test_a_move_that_fails_ends_the_wait_for_engines() -> None:
    async def run() -> None:
        coordinator = make(PARTIAL, [], division=DIVISION, late="engine 0 of judge judge")
        with pytest.raises(WorkerError, match="engine 0 of judge judge did not finish"):
            number = (await coordinator.enter(Phase.GENERATION, 1, True)).number
            await coordinator.acquire(number, "judge", 0, 5)
            await coordinator.acquire(number, "judge", 0, 3, [(1, 1, 1)])
            await coordinator.acquire(number, "judge", 0, 2)

    asyncio.run(run())
