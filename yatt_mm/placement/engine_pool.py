"""Engines that do the same work: who is awake, how much each has under way, who waits for room. Pure state.

A request is a group: of prompts to answer, or of answers to judge. It is bound to an engine as late as can be, when
one has room for it, so a slow engine gets fewer. Times are the caller's; all of them are integrals over changes, so
nothing runs when nothing happens.
"""

from __future__ import annotations

from collections.abc import Collection

from yatt_mm.placement.engine_time import EngineTime

Ended = tuple[int, int, int]
"""An engine, how many requests it gave back, and how many of them are done; the others were cut off."""


class EnginePool:
    """One pool of engines."""

    def __init__(self, *, num_engines: int, requests_per_engine: int, devices_per_engine: int = 1) -> None:
        """`requests_per_engine`: how many an engine is given to work on side by side."""
        self.requests_per_engine = requests_per_engine
        self.devices_per_engine = devices_per_engine
        self.num_ended = 0
        """Requests that ended well, since the start."""
        self._running = [0] * num_engines
        self._awake: set[int] = set()
        self._waiting: dict[int, int] = {}
        """Controller -> requests that it wants to have an engine for; whoever was served last stands last."""
        self._times = EngineTime()
        self._now_s: float | None = None

    @property
    def awake(self) -> frozenset[int]:
        """Engines that may be given work."""
        return frozenset(self._awake)

    @property
    def num_running(self) -> int:
        """Requests that engines have."""
        return sum(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without an engine."""
        return sum(self._waiting.values())

    def running(self, engine: int) -> int:
        """Requests that this engine has."""
        return self._running[engine]

    def wake(self, engine: int, *, now_s: float) -> None:
        """The engine takes requests from now on."""
        self._advance(now_s)
        self._awake.add(engine)

    def rest(self, engine: int, *, now_s: float) -> None:
        """The engine takes none from now on; what it has is still counted until it is finished."""
        self._advance(now_s)
        self._awake.discard(engine)

    def want(self, controller: int, count: int, *, now_s: float) -> None:
        """So many requests of this controller wait now."""
        self._advance(now_s)
        if count:
            self._waiting[controller] = count
        else:
            self._waiting.pop(controller, None)

    def grant(self, controllers: Collection[int], *, now_s: float) -> dict[int, list[int]]:
        """[controller] engines for requests of these, as far as there is room: emptiest first, controllers in turn."""
        self._advance(now_s)
        granted: dict[int, list[int]] = {}
        while ready := [controller for controller in self._waiting if controller in controllers]:
            engine = min(self._awake, key=lambda e: (self._running[e], e), default=None)
            if engine is None or self._running[engine] >= self.requests_per_engine:
                break
            controller = ready[0]
            left = self._waiting.pop(controller) - 1
            if left:
                self._waiting[controller] = left
            self._running[engine] += 1
            granted.setdefault(controller, []).append(engine)
        return granted

    def finish(self, engine: int, count: int, *, num_ended: int, now_s: float) -> None:
        """An engine gave back `count` requests, `num_ended` of them done."""
        self._advance(now_s)
        self._running[engine] -= count
        self.num_ended += num_ended

    def forget_requests(self, *, now_s: float) -> None:
        """A phase is over: nothing is under way any more, and nobody waits."""
        self._advance(now_s)
        self._running = [0] * len(self._running)
        self._waiting.clear()

    def times(self, *, now_s: float) -> EngineTime:
        """Totals until now."""
        self._advance(now_s)
        return self._times

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._now_s if self._now_s is not None else 0.0
        self._now_s = now_s
        running = [self._running[engine] for engine in self._awake]
        passed_device_s = passed_s * self.devices_per_engine
        num_filled = sum(min(1.0, count / self.requests_per_engine) for count in running)
        self._times = EngineTime(
            any_s=self._times.any_s + passed_s * any(running),
            active_s=self._times.active_s + passed_device_s * sum(count > 0 for count in running),
            filled_s=self._times.filled_s + passed_device_s * num_filled,
            crowded_s=self._times.crowded_s + passed_device_s * len(running) * (self.num_waiting > 0),
            held_s=self._times.held_s + passed_device_s * len(running),
        )
