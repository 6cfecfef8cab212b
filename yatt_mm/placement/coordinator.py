"""The placement coordinator: puts roles to sleep, wakes them up, and gives requests to engines that are awake.

Consumes: the phase that all controllers enter; requests for engines.  Produces: transitions, engines, decisions.
Waits for: every transition, up to the deadline.  Unblocked by: the workers, or their end.
The coordinator is a small actor that sees names and counts only, never prompts or weights. In partial colocation it
moves cells between rollout and GenRM while both work, as `yatt_mm.placement.policy` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from yatt_mm.placement.device_ledger import DeviceLedger
from yatt_mm.placement.engine_pool import Ended, EnginePool
from yatt_mm.placement.policy import Decision, Moment, Split
from yatt_mm.placement.rebalancer import CellDivision, Rebalancer
from yatt_mm.placement.state_changes import StateChanges
from yatt_mm.placement.usage_report import Usage, UsageReport
from yatt_mm.protocol.placement_model import MEMORY, Phase, Placement, Role, State, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEntry:
    """The reply that controllers get when a phase has begun."""

    number: int
    """The number of the phase. Requests carry it, so that the coordinator can ignore requests of an earlier phase."""
    awake: Mapping[str, tuple[int, ...]]
    """[pool] Indices of the engines that take requests."""
    moved: tuple[Any, ...]
    """The reports of the training ranks that moved memory when they changed their state
    (`yatt_mm.protocol.training.MovedMemory`)."""


class Coordinator:
    """The class behind the coordinator's Ray actor; its methods run concurrently in asyncio."""

    def __init__(
        self,
        *,
        placement: Placement,
        changes: StateChanges,
        states: Mapping[Unit, State],
        requests_per_engine: Mapping[str, int],
        num_controllers: int,
        division: CellDivision | None,
    ) -> None:
        """Take over the units in the `states` that they have now.

        `changes`: what tells the units to change. `requests_per_engine`: [pool] requests that an engine works on at
        the same time. `division`: how cells may be divided; None in full colocation.
        """
        self._placement = placement
        self._requests_per_engine = dict(requests_per_engine)
        self._changes = changes
        self._clock_s = time.time() - time.monotonic()
        self._occupancy = DeviceLedger(states)
        self._pools = {
            pool: EnginePool(
                num_engines=len(units),
                requests_per_engine=requests_per_engine[pool],
                devices_per_engine=len(units[0].devices),
                is_near=_near(placement, units, num_controllers),
            )
            for pool, units in placement.pools().items()
            if units[0].role is not Role.TRAIN
        }
        for unit, state in states.items():
            if state is State.AWAKE and unit.pool in self._pools:
                self._pools[unit.pool].wake(unit.index, now_s=self._now_s)
        by_role = {
            role: tuple(self._pools[pool] for pool in dict.fromkeys(unit.pool for unit in placement.of_role(role)))
            for role in (Role.ROLLOUT, Role.GENRM)
        }
        self._division = division
        in_cells = {
            role: own
            for role, pools in by_role.items()
            if (own := tuple(pool for pool in pools if pool.devices_per_engine))
        }
        self._mover = Rebalancer(division, in_cells, cell_size=len(placement.cells[0])) if division else None
        self._usage = Usage(by_role, placement)
        self._rollout_cells: list[int] = []
        self._refused: Split | None = None
        """The split that the last decision found better, but too expensive to move to."""
        self._number = 0
        self._acquiring: dict[tuple[str, int], asyncio.Future[list[int]]] = {}
        self._moving: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()
        self._failure: Exception | None = None

    async def enter(
        self, phase: Phase, step: int, is_measured: bool, requests_per_engine: Mapping[str, int] | None = None
    ) -> PhaseEntry:
        """Bring every unit into its state for `phase`, first those that give up memory, then those that take it.

        No request that the phase does not allow may be under way. `is_measured`: True if the phase counts in the
        step's placement metrics. `requests_per_engine`: another number of requests that an engine of each pool
        works on at the same time, for this phase.

        Raises:
            PlacementError: two roles would share a device.
            WorkerError: a unit failed, or did not change its state before the deadline.
        """
        await self._stop_moving()
        self._number += 1
        self._forget_requests()
        for name, pool in self._pools.items():
            pool.requests_per_engine = (requests_per_engine or self._requests_per_engine)[name]
        self._usage.begin(phase if is_measured else None, step, now_s=self._now_s)
        if phase is Phase.GENERATION:
            self._divide()
        wanted = self._placement.wanted(phase, self._rollout_cells)
        held = {unit: MEMORY.index(self._occupancy.state(unit)) for unit in wanted}
        lower = [unit for unit in wanted if MEMORY.index(wanted[unit]) < held[unit]]
        higher = [unit for unit in wanted if MEMORY.index(wanted[unit]) > held[unit]]
        moved = [
            *await self._set_states({unit: wanted[unit] for unit in lower}),
            *await self._set_states({unit: wanted[unit] for unit in higher}),
        ]
        self._occupancy.open(now_s=self._now_s)
        if phase is Phase.GENERATION and self._division is not None and self._division.is_dynamic:
            self._is_ending.clear()
            self._moving = asyncio.create_task(self._keep_moving(self._division.decide_every_s))
        return PhaseEntry(
            number=self._number,
            awake={name: tuple(sorted(pool.awake)) for name, pool in self._pools.items()},
            moved=tuple(moved),
        )

    async def acquire(
        self, number: int, pool: str, controller: int, count: int, ended: Sequence[Ended] = ()
    ) -> list[int]:
        """Wait until engines are free for the first of a controller's `count` requests. Return one engine index for
        each request that may start, at least one.

        The list is empty if the controller has called `want` with 0 in the meantime, or if phase `number` is over.
        `ended`: see `want`.
        """
        self._check()
        if number != self._number:
            return []
        waiting = self._acquiring[pool, controller] = asyncio.get_running_loop().create_future()
        self._take_news(pool, controller, count, ended)
        try:
            return await waiting
        finally:
            if self._acquiring.get((pool, controller)) is waiting:
                del self._acquiring[pool, controller]

    async def want(self, number: int, pool: str, controller: int, count: int, ended: Sequence[Ended] = ()) -> None:
        """Note that `count` requests of a controller wait now, and that engines gave back the requests in `ended`.

        Does nothing if phase `number` is over.
        """
        if number == self._number:
            self._take_news(pool, controller, count, ended)

    async def lose(self, number: int, pool: str, engine: int) -> bool:
        """Note that an engine was lost in phase `number`: it gets no request any more. Return True if another engine of
        the pool is awake."""
        if number == self._number:
            self._pools[pool].sleep(engine, now_s=self._now_s)
        return bool(self._pools[pool].awake)

    async def take_report(self) -> UsageReport:
        """Return what happened on the devices since the last call."""
        return self._usage.take(self._occupancy.take_spans(now_s=self._now_s), now_s=self._now_s)

    @property
    def _now_s(self) -> float:
        """Seconds since the epoch, from a clock that never goes back."""
        return self._clock_s + time.monotonic()

    def _forget_requests(self) -> None:
        """Forget all requests of the last phase. A controller that still waits for an engine gets an empty list.

        A controller can still wait here if its batch became full without it.
        """
        for pool in self._pools.values():
            pool.forget_requests(now_s=self._now_s)
        for waiting in self._acquiring.values():
            if not waiting.done():
                waiting.set_result([])

    def _take_news(self, pool: str, controller: int, count: int, ended: Sequence[Ended]) -> None:
        """Update the pool with what a controller reports, then grant engines that became free."""
        for engine, num_back, num_ended in ended:
            self._pools[pool].finish(engine, num_back, num_ended=num_ended, now_s=self._now_s)
        self._pools[pool].want(controller, count, now_s=self._now_s)
        waiting = self._acquiring.get((pool, controller))
        if not count and waiting is not None and not waiting.done():
            waiting.set_result([])
        self._grant(pool)

    def _grant(self, pool: str) -> None:
        """Give engines of the pool that have room to the controllers that wait in `acquire`."""
        ready = {c: waiting for (name, c), waiting in self._acquiring.items() if name == pool and not waiting.done()}
        for controller, engines in self._pools[pool].grant(ready, now_s=self._now_s).items():
            ready[controller].set_result(engines)

    async def _set_states(self, states: Mapping[Unit, State]) -> list[Any]:
        """Change the states of units, and return what training ranks moved."""
        groups = self._changes.groups(states)
        return list(chain(*await asyncio.gather(*(self._set_state(units, state) for units, state in groups))))

    async def _set_state(self, units: Sequence[Unit], state: State) -> list[Any]:
        """Change the state of units that are told together, and return what training ranks among them moved.

        An engine gets no request before it is awake, and none after it was told to sleep.
        """
        started_s, in_pools = self._now_s, [unit for unit in units if unit.pool in self._pools]
        taking = [unit for unit in units if MEMORY.index(state) > MEMORY.index(self._occupancy.state(unit))]
        for unit in taking:
            self._occupancy.change(unit, state, now_s=started_s)
        if state is not State.AWAKE:
            for unit in in_pools:
                self._pools[unit.pool].sleep(unit.index, now_s=started_s)
        changed = await self._changes.change(units, state)
        for unit, change in zip(units, changed, strict=True):
            if unit not in taking:
                self._occupancy.change(unit, state, now_s=self._now_s)
            self._usage.add_transition(unit.role, state, change.seconds, change.report.held_bytes)
        if state is State.AWAKE:
            for unit in in_pools:
                self._pools[unit.pool].wake(unit.index, now_s=self._now_s)
            for pool in dict.fromkeys(unit.pool for unit in in_pools):
                self._grant(pool)
        return [change.report.moved for change in changed if change.report.moved is not None]

    def _divide(self) -> None:
        """Choose the cells that rollout has at the start of a generation phase."""
        assert self._mover is not None
        decision = self._mover.begin(now_s=self._now_s)
        self._rollout_cells = list(range(decision.split.rollout))
        self._usage.add_decision(Moment.STEP, decision, now_s=self._now_s)

    async def _keep_moving(self, every_s: float) -> None:
        """Decide about moving cells every `every_s` seconds, until the phase ends."""
        try:
            while not self._is_ending.is_set():
                await self._decide()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_ending.wait(), every_s)
        except Exception as error:  # this task ends here: controllers that wait for an engine must get the error
            self._failure = error
            for waiting in self._acquiring.values():
                if not waiting.done():
                    waiting.set_exception(error)

    async def _decide(self) -> None:
        """Ask the placement policy once, and move cells if it wants another split."""
        assert self._mover is not None
        num_rollout, num_cells = len(self._rollout_cells), len(self._placement.cells)
        now = Split(rollout=num_rollout, genrm=num_cells - num_rollout)
        decision = self._mover.inside(now, now_s=self._now_s)
        if decision.split == now:
            if decision.refused not in (None, self._refused):
                self._usage.add_decision(Moment.GENERATION, decision, now_s=self._now_s)
            self._refused = decision.refused
            return
        self._usage.add_decision(Moment.GENERATION, decision, now_s=self._now_s)
        await self._move(decision)

    async def _move(self, decision: Decision) -> None:
        """Give cells to the other role, beginning with the cells that have the fewest requests."""
        num_more = decision.split.rollout - len(self._rollout_cells)
        giver, taker = (Role.GENRM, Role.ROLLOUT) if num_more > 0 else (Role.ROLLOUT, Role.GENRM)
        of_giver = [c for c in range(len(self._placement.cells)) if (c in self._rollout_cells) == (num_more < 0)]
        cells = sorted(of_giver, key=lambda cell: self._num_running(self._placement.in_cell(cell, giver)))
        await asyncio.gather(*(self._move_cell(cell, giver, taker) for cell in cells[: abs(num_more)]))

    async def _move_cell(self, cell: int, giver: Role, taker: Role) -> None:
        """Put the giver's engines in the cell to sleep, then wake the taker's."""
        assert self._mover is not None
        started_s = self._now_s
        await self._set_states(dict.fromkeys(self._placement.in_cell(cell, giver), State.ASLEEP))
        await self._set_states(dict.fromkeys(self._placement.in_cell(cell, taker), State.AWAKE))
        if taker is Role.ROLLOUT:
            self._rollout_cells.append(cell)
        else:
            self._rollout_cells.remove(cell)
        self._mover.note_move(self._now_s - started_s)
        self._usage.num_moves += 1

    def _num_running(self, units: Iterable[Unit]) -> int:
        return sum(self._pools[unit.pool].running(unit.index) for unit in units)

    async def _stop_moving(self) -> None:
        """Stop deciding, and wait for a move that is under way, so that the holder of each device is always known."""
        if self._moving is not None:
            self._is_ending.set()
            await self._moving
            self._moving = None
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _near(placement: Placement, units: Sequence[Unit], num_controllers: int) -> Callable[[int, int], bool]:
    """Return what tells of (controller, index of one of these engines) whether they are on one host. A host without a
    controller is near to all."""
    hosts = [placement.host_of(unit) for unit in units]
    of_controllers = [placement.host_of_number(controller) for controller in range(num_controllers)]
    return lambda controller, engine: hosts[engine] == of_controllers[controller] or hosts[engine] not in of_controllers
