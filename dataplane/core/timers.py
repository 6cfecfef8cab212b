"""Timers: calls to make at a later moment, unless they are moved or cancelled. One thread per process serves all.

A `with` block that may wait for long is limited by `TIMERS.limit(at, call)`: `call` ends the wait, for example by
cancelling a stream. A thread per wait would cost more than a small round trip does.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK_S = 0.1
"""The seconds between two checks of the timers, and so the precision of their moments."""
_IDLE_S = 5.0
"""The seconds after which the thread ends if there is no timer; the next timer starts another thread."""

log = logging.getLogger(__name__)


class Timer:
    """A call to make at `at`, in seconds of `time.monotonic`. To move a pending timer, set `at`."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at = at
        self.call = call


class Timers:
    """The pending timers of this process. Thread-safe. A forked child starts without timers and without a thread."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Timer] = set()
        self._is_running = False

    def start(self, at: float, call: Callable[[], object]) -> Timer:
        """Make `call` at the moment `at` in the thread of all timers, which it must not block for long."""
        timer = Timer(at, call)
        if at == math.inf:
            return timer
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._keep, name="timers", daemon=True).start()
                self._is_running = True
            self._pending.add(timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        """Do not make the call of a timer. A call that already began continues."""
        with self._lock:
            self._pending.discard(timer)

    @contextmanager
    def limit(self, at: float, call: Callable[[], object]) -> Iterator[Timer]:
        """Make `call` if the block is still running at the moment `at`; yield the timer, which the block may move.

        The block itself is not interrupted: the call must end the wait inside it.
        """
        timer = self.start(at, call)
        try:
            yield timer
        finally:
            self.cancel(timer)

    def _keep(self) -> None:
        """Make each call when its moment comes, until there was no timer for `_IDLE_S`."""
        last = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            with self._lock:
                if self._pending:
                    last = now
                elif now - last > _IDLE_S:
                    self._is_running = False
                    return
                due = sorted((timer for timer in self._pending if now > timer.at), key=lambda timer: timer.at)
                self._pending.difference_update(due)
            for timer in due:
                try:
                    timer.call()
                except Exception:
                    log.exception("the call of a timer failed")


TIMERS = Timers()
"""The only instance, which all code of this process shares."""
