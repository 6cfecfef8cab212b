"""Deadlines for `with` blocks that may wait for long. One thread per process watches all of them.

`BLOCK_TIMEOUTS.call_at(deadline, call)` makes `call` in that thread if the block is not over in time; `call` then ends
the wait, for example by cancelling a stream. A timer thread per wait would cost more than a small round trip does.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK_S = 0.1
"""The seconds between two checks of the deadlines."""
_IDLE_S = 5.0
"""The seconds after which the thread ends if it has no deadline to watch; the next block starts another thread."""

log = logging.getLogger(__name__)


class BlockTimeouts:
    """The deadlines of this process's blocks, and the call to make for each missed deadline.

    It is thread-safe. A forked child starts with no deadlines and no thread.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start with no deadlines and no thread."""
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[float, Callable[[], object]]] = {}
        self._is_running = False

    @contextmanager
    def call_at(self, deadline: float, call: Callable[[], object]) -> Iterator[None]:
        """Make the call, in another thread, if the block is still running at `deadline` (seconds of `time.monotonic`).

        The block itself is not interrupted: the call must end the wait inside it, for example by cancelling a stream.
        """
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
        """Watch the deadlines and make the calls of missed deadlines, until there was no deadline for `_IDLE_S`."""
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
                    log.exception("the call for a missed deadline failed")


BLOCK_TIMEOUTS = BlockTimeouts()
"""The only instance, which all code of this process shares."""
