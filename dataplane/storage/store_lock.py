"""The one lock of a store, and waiting for room under it."""

import math
import threading
import time
from collections.abc import Callable

from dataplane.core.errors import OutOfSpaceError


class StoreLock:
    """The lock around everything that uses the object table (`with`). `changed` wakes the callers that wait for
    room."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._later: dict[Callable[[], None], None] = {}

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *exc: object) -> None:
        later, self._later = self._later, {}
        self._condition.release()
        for work in later:
            work()

    def run_after_unlock(self, work: Callable[[], None]) -> None:
        """Run `work` after the lock is released, once. It may be slow and must not raise. The caller holds the lock."""
        self._later[work] = None

    def changed(self) -> None:
        """Wake the callers that wait, because something was freed or closed. The caller holds the lock."""
        self._condition.notify_all()

    def wait(self, deadline: float, describe_shortage: Callable[[], str], wake_at: float = math.inf) -> None:
        """Wait until something changed, or until `wake_at`. The caller holds the lock before and after.

        Raises OutOfSpaceError with the description at `deadline`. Both times are monotonic; a `wake_at` in the past is
        ignored.
        """
        now = time.monotonic()
        until = min(deadline, wake_at) if wake_at > now else deadline
        if deadline <= now or (not self._condition.wait(until - now) and until == deadline):
            raise OutOfSpaceError(describe_shortage())
