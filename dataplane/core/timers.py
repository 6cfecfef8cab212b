"""Things to do when their time has come, unless called off before: one thread for any number of them."""

import heapq
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Timers:
    """Keys with a time each, at which `run(key)` is called in this object's thread. Thread-safe."""

    def __init__(self, run: Callable[[str], object], name: str) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """What was ever set and has not been looked at; `_times` says which of it still counts."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: str) -> bool:
        return key in self._times

    def set(self, key: str, in_s: float) -> None:
        """Run for `key` in so many seconds, whatever was set before."""
        with self._changed:
            self._times[key] = at = time.monotonic() + in_s
            heapq.heappush(self._heap, (at, key))
            if self._heap[0] == (at, key):
                self._changed.notify()

    def cancel(self, key: str) -> None:
        """Do not run for `key`. Nothing happens if it was not set; a run that began goes on."""
        with self._changed:
            self._times.pop(key, None)

    def close(self) -> None:
        """Run nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _work(self) -> None:
        """Consumes the times that come."""
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
                log.exception("what was due for %s failed", key)
