"""The event queue: planned calls in order of time and, at the same time, in order of planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from yatt_mm.common.errors import ConfigError

LATEST_S = 1e9
"""Thirty years: a later clock could not tell decode steps apart."""


class Events:
    """A heap of planned calls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0

    def plan(self, time_s: float, call: Callable[[], None]) -> None:
        """Plan a call at a time, which must not be in the past.

        Raises:
            ConfigError: the time is after `LATEST_S`.
        """
        if not time_s <= LATEST_S:
            raise ConfigError(f"the simulated time passes {LATEST_S:g} s: look for a number in another unit")
        assert time_s >= self.now_s, f"planned for {time_s} s at {self.now_s} s"
        self._num_planned += 1
        heapq.heappush(self._heap, (time_s, self._num_planned, call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Make the planned calls in order, until `is_over` or none is left."""
        while self._heap and not is_over():
            self.now_s, _, call = heapq.heappop(self._heap)
            call()
