"""The quarantine table: media that could not be decoded. They are not tried again, or only after a while. The table is
bounded.

A failure that the bytes cause stays: they cannot be decoded, or the decoder crashed on them twice. A failure that the
machine may have caused (a worker killed for its memory, a decode that took too long) is tried again after `EXPIRY_S`.
"""

import threading
import time
from collections import OrderedDict

from dataplane.core.refs import BadMedia

EXPIRY_S = 600.0
MAX_MEDIA = 100_000
"""The maximum number of entries. The oldest are dropped first, and tried again when a client requests them."""

Key = tuple[str, tuple[str, ...]]
"""The key of an entry: an object's name, and the formats that the file name of its source promises."""


class Quarantine:
    """The table of media that could not be decoded. Thread-safe."""

    def __init__(self, max_media: int = MAX_MEDIA) -> None:
        self._max_media = max_media
        self._lock = threading.Lock()
        self._bad: OrderedDict[Key, tuple[BadMedia, float | None]] = OrderedDict()
        """The entries by key: the bad medium, and the time (monotonic) from which it may be tried again, or None for
        never."""

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self.all())

    def get(self, key: Key) -> BadMedia | None:
        """Return the reason why an object is not made, or None if it may be tried."""
        with self._lock:
            bad, until = self._bad.get(key, (None, None))
            if until is not None and time.monotonic() >= until:
                del self._bad[key]
                return None
            return bad

    def put(self, key: Key, bad: BadMedia, *, is_lasting: bool = True) -> None:
        """Add a medium: for good if `is_lasting`, otherwise for a while."""
        with self._lock:
            self._bad.pop(key, None)
            self._bad[key] = bad, None if is_lasting else time.monotonic() + EXPIRY_S
            while len(self._bad) > self._max_media:
                self._bad.popitem(last=False)

    def all(self) -> list[BadMedia]:
        """Return the present entries, oldest first."""
        now = time.monotonic()
        with self._lock:
            return [bad for bad, until in self._bad.values() if until is None or now < until]
