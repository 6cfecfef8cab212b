"""Media that could not be made into what was asked: not tried again, or not for a while, and not more than a bound.

What the machine may be to blame for (a worker killed for its memory, a decode that took too long) is tried again after
`EXPIRY_S`; what the bytes themselves are to blame for stays.
"""

import threading
import time
from collections import OrderedDict

from dataplane.core.refs import BadMedia

EXPIRY_S = 600.0
MAX_MEDIA = 100_000
"""The oldest are forgotten beyond it, and tried again when they are asked for."""

Wanted = tuple[str, tuple[str, ...]]
"""What is asked for: an object's name, and the formats that the name of its source's file promises."""


class Quarantine:
    """By what was asked for. Thread-safe."""

    def __init__(self, max_media: int = MAX_MEDIA) -> None:
        self._max_media = max_media
        self._lock = threading.Lock()
        self._bad: OrderedDict[Wanted, tuple[BadMedia, float | None]] = OrderedDict()
        """With the time from which on it may be tried again, if ever."""

    def __contains__(self, wanted: Wanted) -> bool:
        return self.get(wanted) is not None

    def __len__(self) -> int:
        return len(self.all())

    def get(self, wanted: Wanted) -> BadMedia | None:
        """Why this is not made; None if it may be tried."""
        with self._lock:
            bad, until = self._bad.get(wanted, (None, None))
            if until is not None and time.monotonic() >= until:
                del self._bad[wanted]
                return None
            return bad

    def put(self, wanted: Wanted, bad: BadMedia, *, is_lasting: bool = True) -> None:
        """Set a medium aside; for a while only, unless its fault is lasting."""
        with self._lock:
            self._bad.pop(wanted, None)
            self._bad[wanted] = bad, None if is_lasting else time.monotonic() + EXPIRY_S
            while len(self._bad) > self._max_media:
                self._bad.popitem(last=False)

    def all(self) -> list[BadMedia]:
        """What is set aside now, oldest first."""
        now = time.monotonic()
        with self._lock:
            return [bad for bad, until in self._bad.values() if until is None or now < until]
