"""Timers: calls to make at a later moment unless they are cancelled. One thread serves any number of them."""

import heapq
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Timers:
    """A set of keys with one moment each, at which `run(key)` is called in this object's thread. It is thread-safe."""

    def __init__(self, run: Callable[[str], object], name: str) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """A heap of (moment, key) for each call of `set`, in seconds of `time.monotonic`. An entry counts only if
        `_times` has the same moment."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: str) -> bool:
        return key in self._times

    def set(self, key: str, in_s: float) -> None:
        """Call `run(key)` in `in_s` seconds. This replaces an earlier time of the same key."""
        with self._changed:
            self._times[key] = at = time.monotonic() + in_s
            heapq.heappush(self._heap, (at, key))
            if self._heap[0] == (at, key):
                self._changed.notify()

    def cancel(self, key: str) -> None:
        """Do not call `run(key)`. This has no effect if the key has no time; a call that already began continues."""
        with self._changed:
            self._times.pop(key, None)

    def close(self) -> None:
        """Stop the thread: no more calls are made."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _work(self) -> None:
        """Make each call when its moment comes, until `close`."""
        while True:
            with self._changed:
                while not self._is_closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if self._is_closed:
                    return
                at, key = heapq.heappop(self._heap)
                if self._times.get(key) != at:
                    continue
                del self._times[key]
            try:
                self._run(key)
            except Exception:
                log.exception("the timer of %s failed", key)
