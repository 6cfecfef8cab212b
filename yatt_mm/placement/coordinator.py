"""The placement coordinator: puts roles to sleep and wakes them, and gives requests to engines that are awake.

Consumes: the phase that all controllers enter; wishes for engines.  Produces: transitions, engines, decisions.
Waits for: every transition, up to the deadline.  Unblocked by: the workers, or their end.
A small actor that sees names and counts only. In partial colocation it moves cells between rollout and GenRM while
they work, as `yatt_mm.placement.policy` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yatt_mm.common.held_memory import StateReport
from yatt_mm.common.ray_calls import answer_of
from yatt_mm.placement.device_ledger import DeviceLedger
from yatt_mm.placement.engine_pool import Ended, EnginePool
from yatt_mm.placement.policy import Decision, Moment, Split
from yatt_mm.placement.rebalancer import CellDivision, Rebalancer
from yatt_mm.placement.usage_report import Usage, UsageReport
from yatt_mm.protocol.placement_model import MEMORY, Phase, Placement, Role, State, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEntry:
    """What the controllers are told of a phase that has begun."""

    number: int
    """Of the phase; requests name it, so that those of an earlier one are told apart."""
    awake: Mapping[str, tuple[int, ...]]
    """[pool] engines that take requests."""
    moved: tuple[Any, ...]
    """What each training rank reports of its change, if it made one (`yatt_mm.protocol.training.Moved`)."""


class Coordinator:
    """Body of a Ray actor with asyncio concurrency."""

    def __init__(
        self,
        *,
        placement: Placement,
        workers: Mapping[Unit, Any],
        states: Mapping[Unit, State],
        requests_per_engine: Mapping[str, int],
        division: CellDivision | None,
        deadline_s: float,
    ) -> None:
        """`workers`: the actors behind the units; `states`: as they are now. `division` is for partial colocation."""
        self._placement = placement
        self._workers = dict(workers)
        self._deadline_s = deadline_s
        self._clock_s = time.time() - time.monotonic()
        self._occupancy = DeviceLedger(states)
        self._pools = {
            pool: EnginePool(
                num_engines=len(units),
                requests_per_engine=requests_per_engine[pool],
                devices_per_engine=len(units[0].devices),
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
        """What the last decision held to cost too much."""
        self._number = 0
        self._acquiring: dict[tuple[str, int], asyncio.Future[list[int]]] = {}
        self._moving: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()
        self._failure: Exception | None = None

    async def enter(self, phase: Phase, step: int, is_measured: bool) -> PhaseEntry:
        """Bring every unit into its state of `phase`; nothing may be under way that the phase does not allow.

        `is_measured`: the phase counts in the step's metrics of placement.

        Raises:
            PlacementError: two roles would share a device.
            WorkerError: a unit failed, or took too long.
        """
        await self._stop_moving()
        self._number += 1
        self._forget_requests()
        self._usage.begin(phase if is_measured else None, step, now_s=self._now_s)
        if phase is Phase.GENERATION:
            self._divide()
        wanted = self._placement.wanted(phase, self._rollout_cells)
        held = {unit: MEMORY.index(self._occupancy.state(unit)) for unit in wanted}
        lower = [unit for unit in wanted if MEMORY.index(wanted[unit]) < held[unit]]
        higher = [unit for unit in wanted if MEMORY.index(wanted[unit]) > held[unit]]
        results = [
            *await asyncio.gather(*(self._set_state(unit, wanted[unit]) for unit in lower)),
            *await asyncio.gather(*(self._set_state(unit, wanted[unit]) for unit in higher)),
        ]
        self._occupancy.open(now_s=self._now_s)
        if phase is Phase.GENERATION and self._division is not None and self._division.is_dynamic:
            self._is_ending.clear()
            self._moving = asyncio.create_task(self._keep_moving(self._division.decide_every_s))
        return PhaseEntry(
            number=self._number,
            awake={name: tuple(sorted(pool.awake)) for name, pool in self._pools.items()},
            moved=tuple(result for result in results if result is not None),
        )

    async def acquire(
        self, number: int, pool: str, controller: int, count: int, ended: Sequence[Ended] = ()
    ) -> list[int]:
        """Engines for at least one of `count` requests of a controller in phase `number`, one entry a request.

        Empty when the controller has called `want` with 0 meanwhile, or the phase is over. `ended` as of `want`.
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
        """So many requests of a controller wait now, and engines have given back what has `ended`."""
        if number == self._number:
            self._take_news(pool, controller, count, ended)

    async def take_report(self) -> UsageReport:
        """What happened since the last call."""
        return self._usage.take(self._occupancy.take_spans(now_s=self._now_s), now_s=self._now_s)

    @property
    def _now_s(self) -> float:
        """Seconds since the epoch that never go back."""
        return self._clock_s + time.monotonic()

    def _forget_requests(self) -> None:
        """Nothing is under way any more; who still waits for an engine, as behind a full batch, gets none."""
        for pool in self._pools.values():
            pool.forget_requests(now_s=self._now_s)
        for waiting in self._acquiring.values():
            if not waiting.done():
                waiting.set_result([])

    def _take_news(self, pool: str, controller: int, count: int, ended: Sequence[Ended]) -> None:
        for engine, num_back, num_ended in ended:
            self._pools[pool].finish(engine, num_back, num_ended=num_ended, now_s=self._now_s)
        self._pools[pool].want(controller, count, now_s=self._now_s)
        waiting = self._acquiring.get((pool, controller))
        if not count and waiting is not None and not waiting.done():
            waiting.set_result([])
        self._grant(pool)

    def _grant(self, pool: str) -> None:
        ready = {c: waiting for (name, c), waiting in self._acquiring.items() if name == pool and not waiting.done()}
        for controller, engines in self._pools[pool].grant(ready, now_s=self._now_s).items():
            ready[controller].set_result(engines)

    async def _set_state(self, unit: Unit, state: State) -> Any:
        """Change one unit; what a training rank reports of it.

        An engine is given no request before it is awake and none after it was told to sleep.
        """
        pool, held, started_s = self._pools.get(unit.pool), self._occupancy.state(unit), self._now_s
        takes_memory = MEMORY.index(state) > MEMORY.index(held)
        if takes_memory:
            self._occupancy.change(unit, state, now_s=started_s)
        if pool is not None and state is not State.AWAKE:
            pool.rest(unit.index, now_s=started_s)
        call = self._workers[unit].set_state.remote(state)
        changed: StateReport = await answer_of(
            call, name=str(unit), what=f"becoming {state}", deadline_s=self._deadline_s
        )
        if not takes_memory:
            self._occupancy.change(unit, state, now_s=self._now_s)
        self._usage.add_transition(unit.role, state, self._now_s - started_s, changed.held_bytes)
        if pool is not None and state is State.AWAKE:
            pool.wake(unit.index, now_s=self._now_s)
            self._grant(unit.pool)
        return changed.moved

    def _divide(self) -> None:
        """Choose the cells that begin a generation phase with rollout."""
        assert self._mover is not None
        decision = self._mover.begin(now_s=self._now_s)
        self._rollout_cells = list(range(decision.split.rollout))
        self._usage.add_decision(Moment.STEP, decision, now_s=self._now_s)

    async def _keep_moving(self, every_s: float) -> None:
        try:
            while not self._is_ending.is_set():
                await self._decide()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_ending.wait(), every_s)
        except Exception as error:  # the edge of a task: whoever waits for an engine must hear of it
            self._failure = error
            for waiting in self._acquiring.values():
                if not waiting.done():
                    waiting.set_exception(error)

    async def _decide(self) -> None:
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
        """Give cells to the other role, those with the fewest requests first."""
        num_more = decision.split.rollout - len(self._rollout_cells)
        giver, taker = (Role.GENRM, Role.ROLLOUT) if num_more > 0 else (Role.ROLLOUT, Role.GENRM)
        of_giver = [c for c in range(len(self._placement.cells)) if (c in self._rollout_cells) == (num_more < 0)]
        cells = sorted(of_giver, key=lambda cell: self._num_running(self._placement.in_cell(cell, giver)))
        await asyncio.gather(*(self._move_cell(cell, giver, taker) for cell in cells[: abs(num_more)]))

    async def _move_cell(self, cell: int, giver: Role, taker: Role) -> None:
        assert self._mover is not None
        started_s = self._now_s
        await asyncio.gather(*(self._set_state(unit, State.ASLEEP) for unit in self._placement.in_cell(cell, giver)))
        await asyncio.gather(*(self._set_state(unit, State.AWAKE) for unit in self._placement.in_cell(cell, taker)))
        if taker is Role.ROLLOUT:
            self._rollout_cells.append(cell)
        else:
            self._rollout_cells.remove(cell)
        self._mover.note_move(self._now_s - started_s)
        self._usage.num_moves += 1

    def _num_running(self, units: Iterable[Unit]) -> int:
        return sum(self._pools[unit.pool].running(unit.index) for unit in units)

    async def _stop_moving(self) -> None:
        """A move that is under way is waited for: what holds a device is known at any time."""
        if self._moving is not None:
            self._is_ending.set()
            await self._moving
            self._moving = None
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
