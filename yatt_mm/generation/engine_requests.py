"""Which engine gets a group: the one that has room for it first, or in a deterministic phase the one that the run's
order says."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.phase_calls import PhaseCalls
from yatt_mm.placement.coordinator_client import CoordinatorClient


class Engines(Protocol):
    """Gives engines of one pool to groups."""

    async def acquire(self, work: GroupWork) -> int:
        """Return the number of the engine that the group gets."""

    def give_back(self, engine: int, *, is_done: bool) -> None:
        """Note that an engine has given a group back: finished, or cut off."""


class FixedEngines:
    """The engines of a deterministic phase. The run's order alone decides which one a group gets."""

    def __init__(self, awake: Sequence[int]) -> None:
        self.awake = awake

    async def acquire(self, work: GroupWork) -> int:
        """Return the number of the engine that the group gets."""
        return self.awake[work.prompt.slot.position % len(self.awake)]

    def give_back(self, engine: int, *, is_done: bool) -> None:
        """Do nothing: the engine has all its groups already."""


class QueuedEngines:
    """The engines of a phase in which groups wait for an engine with room. The coordinator grants the engines.

    At the end of a tick the coordinator hears in one call how many groups wait and which engines gave groups back.
    """

    def __init__(self, calls: PhaseCalls, coordinator: CoordinatorClient, pool: str, *, phase: int) -> None:
        """`phase`: the coordinator's number of the phase."""
        self._calls = calls
        self._coordinator = coordinator
        self._pool = pool
        self._phase = phase
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._given_back: Counter[int] = Counter()
        """[engine] the number of groups that it gave back since the coordinator heard of them last."""
        self._done: Counter[int] = Counter()
        """[engine] the number of finished groups among them."""
        self._is_asking = False
        self._will_tell = False

    async def acquire(self, work: GroupWork) -> int:
        """Wait until an engine has room, and return its number."""
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        self._tell_soon()
        try:
            return await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # the engine came in the tick in which the group was cut off
                self.give_back(granted.result(), is_done=False)
            self._tell_soon()
            raise

    def give_back(self, engine: int, *, is_done: bool) -> None:
        """Note that an engine has given a group back: finished, or cut off."""
        self._given_back[engine] += 1
        self._done[engine] += is_done
        self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Tell the coordinator in one call what waits and what was given back, and ask for engines if no such call is
        open."""
        self._will_tell = False
        if self._calls.is_over:
            return
        self._waiting = deque(granted for granted in self._waiting if not granted.done())
        ended = [(engine, count, self._done[engine]) for engine, count in self._given_back.items()]
        if self._waiting and not self._is_asking:
            self._is_asking = True
            self._calls.start(self._ask(ended))
        elif ended or self._is_asking:
            self._coordinator.want(self._phase, self._pool, len(self._waiting), ended)
        self._given_back.clear()
        self._done.clear()

    async def _ask(self, ended: Sequence[tuple[int, int, int]]) -> None:
        num_waiting = sum(not granted.done() for granted in self._waiting)
        call = self._coordinator.acquire(self._phase, self._pool, num_waiting, ended)
        engines = await self._calls.reply(call, name="the coordinator", what=f"an engine of {self._pool}")
        self._is_asking = False
        for engine in sorted(engines):
            while self._waiting and self._waiting[0].done():  # the group was cut off in the meantime
                self._waiting.popleft()
            if self._waiting:
                self._waiting.popleft().set_result(engine)
            else:
                self.give_back(engine, is_done=False)
        self._tell_soon()
