"""The one lock of a store, and waiting under it for room."""

import math
import threading
import time
from collections.abc import Callable

from dataplane.core.errors import OutOfSpaceError


class StoreLock:
    """Hold it (`with`) around everything that touches residents; `changed` wakes whoever waits for room."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *exc: object) -> None:
        later, self._later = self._later, []
        self._condition.release()
        for work in later:
            work()

    def later(self, work: Callable[[], None]) -> None:
        """Do this, which may be slow and must not raise, when the lock is let go. The lock is held."""
        self._later.append(work)

    def changed(self) -> None:
        """Something was given back or closed. The lock is held."""
        self._condition.notify_all()

    def wait(self, deadline: float, describe_shortage: Callable[[], str], wake_at: float = math.inf) -> None:
        """Until something changed, or `wake_at` has come. The lock is held before and after.

        OutOfSpaceError with the description at `deadline` (monotonic, as `wake_at`; one that has passed is ignored).
        """
        now = time.monotonic()
        until = min(deadline, wake_at) if wake_at > now else deadline
        if deadline <= now or (not self._condition.wait(until - now) and until == deadline):
            raise OutOfSpaceError(describe_shortage())
