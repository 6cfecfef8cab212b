"""The clock: what happens when, in order of time and, at the same time, of planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from yatt_mm.common.errors import ConfigError

LATEST_S = 1e9
"""Thirty years: a clock that stands there no longer tells decode steps apart."""


class Events:
    """A heap of planned calls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0

    def plan(self, time_s: float, call: Callable[[], None]) -> None:
        """Have `call` called at a time, which must not be past.

        Raises:
            ConfigError: the time is after `LATEST_S`.
        """
        if not time_s <= LATEST_S:
            raise ConfigError(f"the simulated time passes {LATEST_S:g} s: look for a number in another unit")
        assert time_s >= self.now_s, f"planned for {time_s} s at {self.now_s} s"
        self._num_planned += 1
        heapq.heappush(self._heap, (time_s, self._num_planned, call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Call what is planned, in order, until `is_over` or nothing is left."""
        while self._heap and not is_over():
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
