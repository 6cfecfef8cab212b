"""A pool of engines that do the same work: which are awake, and how many requests each has. Pure state.

A request is one group: its responses are to be sampled, or to be judged. A request gets its engine as late as possible,
when an engine has room for it, so a slow engine gets fewer requests. The caller gives the time of every change. Times
are summed at each change, so no timer runs between changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from yatt_mm.placement.engine_time import EngineTime

Ended = tuple[int, int, int]
"""(index of an engine, number of requests that it gave back, number of those that are done; the rest were cut off)."""


class EnginePool:
    """The engines of one pool, their requests, and the controllers that wait for an engine."""

    def __init__(
        self,
        *,
        num_engines: int,
        requests_per_engine: int,
        devices_per_engine: int = 1,
        is_near: Callable[[int, int], bool] = lambda controller, engine: True,
    ) -> None:
        """Make a pool in which every engine sleeps.

        `requests_per_engine`: requests that an engine works on at the same time. `is_near`: tells of (controller,
        engine) whether they are on one host, so that the controller's media are near.
        """
        self._is_near = is_near
        self._has_ended = False
        """True if a request of the present phase is done."""
        self.requests_per_engine = requests_per_engine
        self.devices_per_engine = devices_per_engine
        self.num_ended = 0
        """The number of requests that were finished since the start, without those that were cut off."""
        self._running = [0] * num_engines
        self._awake: set[int] = set()
        self._waiting: dict[int, int] = {}
        """[controller] Requests that need an engine, in the order of serving: the controller that was served last is
        last."""
        self._times = EngineTime()
        self._now_s: float | None = None

    @property
    def awake(self) -> frozenset[int]:
        """Indices of the engines that take requests."""
        return frozenset(self._awake)

    @property
    def num_running(self) -> int:
        """Number of requests that the engines have."""
        return sum(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return sum(self._waiting.values())

    def running(self, engine: int) -> int:
        """Return the number of requests that this engine has."""
        return self._running[engine]

    def wake(self, engine: int, *, now_s: float) -> None:
        """Let the engine take requests from now on."""
        self._advance(now_s)
        self._awake.add(engine)

    def sleep(self, engine: int, *, now_s: float) -> None:
        """Give the engine no requests from now on. The requests that it has still count until they are finished."""
        self._advance(now_s)
        self._awake.discard(engine)

    def want(self, controller: int, count: int, *, now_s: float) -> None:
        """Note that `count` requests of this controller wait now."""
        self._advance(now_s)
        if count:
            self._waiting[controller] = count
        else:
            self._waiting.pop(controller, None)

    def grant(self, controllers: Collection[int], *, now_s: float) -> dict[int, list[int]]:
        """Return [controller] engines for the waiting requests of these controllers: one engine per request.

        Stops when no engine has room. The controllers take turns, and the engine with the fewest requests comes first.
        A controller gets one on another host only if those on its own are full and no controller there waits for it;
        and not before a request of the phase is done, because until then controllers there may not have asked yet.
        """
        self._advance(now_s)
        granted: dict[int, list[int]] = {}
        while choice := self._choose([controller for controller in self._waiting if controller in controllers]):
            controller, engine = choice
            left = self._waiting.pop(controller) - 1
            if left:
                self._waiting[controller] = left
            self._running[engine] += 1
            granted.setdefault(controller, []).append(engine)
        return granted

    def _choose(self, ready: Sequence[int]) -> tuple[int, int] | None:
        """Return the first of these controllers for which there is an engine, with the engine; None for no such one."""
        with_room = [engine for engine in self._awake if self._running[engine] < self.requests_per_engine]
        for controller in ready if with_room else ():
            if engines := self._near(controller, with_room) or self._far(controller, with_room):
                return controller, min(engines, key=lambda engine: (self._running[engine], engine))
        return None

    def _near(self, controller: int, engines: Collection[int]) -> list[int]:
        return [engine for engine in engines if self._is_near(controller, engine)]

    def _far(self, controller: int, with_room: Sequence[int]) -> list[int]:
        """Return the engines on other hosts that a controller may use now."""
        if self._near(controller, self._awake) and not self._has_ended:
            return []
        return [e for e in with_room if not any(self._is_near(other, e) for other in self._waiting)]

    def finish(self, engine: int, count: int, *, num_ended: int, now_s: float) -> None:
        """Note that an engine gave back `count` requests, of which `num_ended` are done."""
        self._advance(now_s)
        self._running[engine] -= count
        self.num_ended += num_ended
        self._has_ended |= num_ended > 0

    def forget_requests(self, *, now_s: float) -> None:
        """Forget all requests, under way or waiting, because their phase is over."""
        self._advance(now_s)
        self._running = [0] * len(self._running)
        self._waiting.clear()
        self._has_ended = False

    def times(self, *, now_s: float) -> EngineTime:
        """Return the engines' total times in use, from the start to `now_s`."""
        self._advance(now_s)
        return self._times

    def _advance(self, now_s: float) -> None:
        """Add the time since the last change to the totals."""
        passed_s = now_s - self._now_s if self._now_s is not None else 0.0
        self._now_s = now_s
        running = [self._running[engine] for engine in self._awake]
        passed_device_s = passed_s * self.devices_per_engine
        num_filled = sum(min(1.0, count / self.requests_per_engine) for count in running)
        self._times = EngineTime(
            any_active_s=self._times.any_active_s + passed_s * any(running),
            active_s=self._times.active_s + passed_device_s * sum(count > 0 for count in running),
            filled_s=self._times.filled_s + passed_device_s * num_filled,
            crowded_s=self._times.crowded_s + passed_device_s * len(running) * (self.num_waiting > 0),
            held_s=self._times.held_s + passed_device_s * len(running),
        )
