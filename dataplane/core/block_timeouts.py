"""Cutting what takes too long, by one thread of the process: a thread per wait costs more than a small round trip."""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK_S = 0.1
_IDLE_S = 5.0
"""The thread ends when there was nothing to watch for this long; the next wait starts another."""

log = logging.getLogger(__name__)


class BlockTimeouts:
    """Calls that are made if a block does not end in time. Thread-safe; a forked child starts with none."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[float, Callable[[], object]]] = {}
        self._is_running = False

    @contextmanager
    def cut(self, deadline: float, call: Callable[[], object]) -> Iterator[None]:
        """Make the call, in another thread, if the block is not over at `deadline` (monotonic)."""
        number = next(self._numbers)
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._keep, name="overdue", daemon=True).start()
                self._is_running = True
            self._waits[number] = (deadline, call)
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(number, None)

    def _keep(self) -> None:
        """Ends when nothing was to be watched for a while."""
        last = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            with self._lock:
                if self._waits:
                    last = now
                elif now - last > _IDLE_S:
                    self._is_running = False
                    return
                over = [number for number, (deadline, _) in self._waits.items() if now > deadline]
                calls = [self._waits.pop(number)[1] for number in over]
            for call in calls:
                try:
                    call()
                except Exception:
                    log.exception("a call at a deadline failed")


BLOCK_TIMEOUTS = BlockTimeouts()
"""Of this process."""
