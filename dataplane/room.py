"""The one lock of a store, and waiting under it for room."""

import threading
import time

from dataplane.errors import OutOfSpaceError


class Room:
    """Hold it (`with`) around everything that touches residents; `changed` wakes whoever waits for room."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *exc: object) -> None:
        self._condition.release()

    def changed(self) -> None:
        """Something was given back or closed. The lock is held."""
        self._condition.notify_all()

    def wait(self, deadline: float, shortage: str) -> None:
        """Until something changed. The lock is held before and after. OutOfSpaceError(shortage) at `deadline`."""
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._condition.wait(remaining):
            raise OutOfSpaceError(shortage)
