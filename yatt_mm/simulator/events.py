"""The event queue: planned calls in the order of their times. Calls with the same time keep the order in which they
were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from yatt_mm.common.errors import ConfigError

LATEST_S = 1e9
"""The latest time for an event, in seconds (thirty years). With a larger clock value, floats cannot tell single decode
steps apart."""


class Events:
    """The event queue of a simulation: a heap of planned calls and the virtual clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0

    def plan(self, time_s: float, call: Callable[[], None]) -> None:
        """Plan a call for a time, which must not be in the past.

        Raises:
            ConfigError: the time is after `LATEST_S`.
        """
        if not time_s <= LATEST_S:
            raise ConfigError(f"the simulated time passes {LATEST_S:g} s: look for a number in another unit")
        assert time_s >= self.now_s, f"planned for {time_s} s at {self.now_s} s"
        self._num_planned += 1
        heapq.heappush(self._heap, (time_s, self._num_planned, call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Make the planned calls in order, until `is_over()` is true or no call is left."""
        while self._heap and not is_over():
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
