"""A fleet: all awake engines of one role, and the requests that wait for them.

A request goes to the engine with the fewest sequences if that has room; otherwise it waits, first come first served.
The samples of a group start together if there is room, so that their prompt is read once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from yatt_mm.placement.engine_time import EngineTime
from yatt_mm.simulator.config import EngineSection
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.modelled_engine import ModelledEngine, Request, Speed


class Fleet:
    """The engines of one role."""

    def __init__(
        self, speed: EngineSection, devices_per_cell: int, events: Events, on_end: Callable[[Request], None]
    ) -> None:
        self.speed = Speed.of(speed)
        self.waiting: deque[Request] = deque()
        self.num_ended = 0
        self._engines_per_cell = devices_per_cell // speed.devices
        self._requests_per_cell = self._engines_per_cell * self.speed.knee
        self._events = events
        self._on_end = on_end
        self._engines: dict[int, list[ModelledEngine]] = {}
        self._by_load: list[tuple[int, int, ModelledEngine]] = []
        self._num_engines_made = 0
        self._num_running = 0
        self._gone_active_s = 0.0
        self._gone_filled_s = 0.0
        self._held_since_s: dict[int, float] = {}
        self._gone_held_s = 0.0
        self._crowded_s = 0.0
        self._crowded_until_s = 0.0

    @property
    def requests_per_cell(self) -> float:
        """The number of sequences at which a cell is full."""
        return self._requests_per_cell

    @property
    def cells(self) -> list[int]:
        """The cells of the role, in order."""
        return sorted(self._engines)

    @property
    def num_running(self) -> int:
        """The number of requests at work."""
        return self._num_running

    @property
    def num_present(self) -> int:
        """The number of requests at work or waiting."""
        return self._num_running + len(self.waiting)

    def times(self) -> EngineTime:
        """Return how many cell-seconds the engines worked, were idle, and had more requests than places, so far."""
        now_s = self._events.now_s
        self._count_crowded()
        engines = [engine for group in self._engines.values() for engine in group]
        for engine in engines:
            engine.advance(now_s)
        active_s = self._gone_active_s + sum(engine.active_s for engine in engines)
        filled_s = self._gone_filled_s + sum(engine.filled_s for engine in engines)
        held_s = self._gone_held_s + sum(now_s - since_s for since_s in self._held_since_s.values())
        return EngineTime(
            active_s=active_s / self._engines_per_cell,
            filled_s=filled_s / self._engines_per_cell,
            crowded_s=self._crowded_s,
            held_s=held_s,
        )

    def emptiest(self, count: int) -> list[int]:
        """Return the cells with the fewest requests at work."""
        return sorted(self._engines, key=lambda cell: (sum(e.num_running for e in self._engines[cell]), cell))[:count]

    def wake(self, cell: int) -> None:
        """Wake up the role's engines on a cell."""
        self._count_crowded()
        now_s = self._events.now_s
        assert cell not in self._engines
        self._engines[cell] = [ModelledEngine(self.speed, clock_s=now_s) for _ in range(self._engines_per_cell)]
        self._held_since_s[cell] = now_s
        for engine in self._engines[cell]:
            self._offer(engine)
        self.fill()

    def sleep(self, cell: int) -> None:
        """Put the engines on a cell to sleep. Their requests continue elsewhere, before others."""
        self._count_crowded()
        now_s = self._events.now_s
        cut: list[Request] = []
        for engine in self._engines.pop(cell):
            cut += engine.drain(now_s)
            engine.version = -1  # this cancels all planned events of the engine
            self._gone_active_s += engine.active_s
            self._gone_filled_s += engine.filled_s
        self._gone_held_s += now_s - self._held_since_s.pop(cell)
        self._num_running -= len(cut)
        self.waiting.extendleft(reversed(cut))
        self.fill()

    def submit(self, requests: Iterable[Request]) -> None:
        """Take requests that are ready."""
        self._count_crowded()
        self.waiting.extend(requests)
        self.fill()

    def drop(self, groups: set[int]) -> int:
        """Abort all requests of some groups; return how many."""
        self._count_crowded()
        num = len(self.waiting)
        self.waiting = deque(request for request in self.waiting if request.group not in groups)
        num -= len(self.waiting)
        for engines in self._engines.values():
            for engine in engines:
                dropped = engine.drop(groups, self._events.now_s)
                if dropped:
                    num += dropped
                    self._num_running -= dropped
                    self._changed(engine)
        self.fill()
        return num

    def pause(self, seconds: float) -> None:
        """Stop all engines for this time."""
        for engines in self._engines.values():
            for engine in engines:
                engine.pause(self._events.now_s, seconds)
                self._plan(engine)

    def fill(self) -> None:
        """Start the waiting requests that have room."""
        touched: dict[int, ModelledEngine] = {}
        while self.waiting:
            engine = self._least_loaded()
            if engine is None or not engine.has_room(self.waiting[0]):
                break
            group = self.waiting[0].group
            while self.waiting and self.waiting[0].group == group and engine.has_room(self.waiting[0]):
                engine.add(self.waiting.popleft(), self._events.now_s)
                self._num_running += 1
            touched[id(engine)] = engine
            self._offer(engine)
        for engine in touched.values():
            self._plan(engine)

    def _count_crowded(self) -> None:
        """Add the time since the last call to the crowded time, if there are more requests than places for them. Called
        before the requests or the cells change."""
        now_s, num_cells = self._events.now_s, len(self._engines)
        if self.num_present > num_cells * self._requests_per_cell:
            self._crowded_s += num_cells * (now_s - self._crowded_until_s)
        self._crowded_until_s = now_s

    def _least_loaded(self) -> ModelledEngine | None:
        while self._by_load:
            load, _, engine = self._by_load[0]
            if engine.version >= 0 and engine.num_running == load:
                return engine
            heapq.heappop(self._by_load)
        return None

    def _offer(self, engine: ModelledEngine) -> None:
        self._num_engines_made += 1
        heapq.heappush(self._by_load, (engine.num_running, self._num_engines_made, engine))

    def _changed(self, engine: ModelledEngine) -> None:
        self._offer(engine)
        self._plan(engine)

    def _plan(self, engine: ModelledEngine) -> None:
        end_s = engine.next_end_s()
        if end_s is not None:
            version = engine.version
            self._events.plan(max(end_s, self._events.now_s), lambda: self._end(engine, version))

    def _end(self, engine: ModelledEngine, version: int) -> None:
        if engine.version != version:
            return
        self._count_crowded()
        ended = engine.pop_ended(self._events.now_s)
        self._num_running -= len(ended)
        self._changed(engine)
        for request in ended:
            assert not request.is_over, "a request ended twice"
            request.is_over = True
            self.num_ended += 1
            self._on_end(request)
        self.fill()
