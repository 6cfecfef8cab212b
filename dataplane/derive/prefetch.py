"""Objects that were prefetched and not used yet. They are counted, and never evicted to make room for other prefetched
objects.

Prefetching fills the arena until it would have to evict prefetched objects; objects that clients request may evict them
as usual. Prefetching never waits for room.
"""

import threading
import time

from dataplane.core.errors import OutOfSpaceError
from dataplane.core.units import format_bytes
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.store import Slab, Store

WINDOW = 1024
"""The maximum number of queued objects."""


class PrefetchedObjects:
    """The prefetched objects that no client has used yet. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._unused: dict[str, int] = {}
        """The bytes in the arena by name; 0 while an object is being made."""
        self._promised_bytes = 0
        """The bytes of slabs that are being allocated now."""
        self._num_made = 0
        self._num_hits = 0
        self._num_refused = 0

    def begin(self, name: str) -> None:
        """Note that an object is about to be prefetched."""
        with self._lock:
            self._unused[name] = 0

    def end(self, name: str, nbytes: int | None) -> None:
        """Note that the object was made with this many bytes. None means that it was not made."""
        with self._lock:
            self._num_made += nbytes is not None
            if nbytes is None:
                self._unused.pop(name, None)
            elif name in self._unused:  # otherwise a client has asked for it already
                self._unused[name] = slab_bytes(nbytes)

    def note_refusal(self) -> None:
        """Note that an object had no room, and that the objects queued behind it were cancelled."""
        with self._lock:
            self._num_refused += 1

    def use(self, name: str) -> None:
        """Note that a client uses an object, prefetched or not."""
        with self._lock:
            self._num_hits += self._unused.pop(name, None) is not None

    def allocate(self, nbytes: int) -> Slab:
        """Return a slab if no unused prefetched object must be evicted for it. Otherwise raise OutOfSpaceError."""
        with self._lock:
            if not self._has_room(nbytes):
                self._forget_evicted()
                if not self._has_room(nbytes):
                    raise OutOfSpaceError(f"no room for {format_bytes(nbytes)} but that of what was prefetched before")
            self._promised_bytes += slab_bytes(nbytes)
            unused = list(self._unused)
        try:  # without the lock: this may write to disk, and every client that asks for an object needs the lock
            self._store.make_youngest(unused)
            return self._store.allocate(nbytes, time.monotonic())
        finally:
            with self._lock:
                self._promised_bytes -= slab_bytes(nbytes)

    def stat(self) -> dict[str, int]:
        """Return how many objects were prefetched, how many of them were used, and how often there was no room."""
        with self._lock:
            return {
                "num_prefetched": self._num_made,
                "num_prefetch_hits": self._num_hits,
                "num_prefetch_refused": self._num_refused,
            }

    def _has_room(self, nbytes: int) -> bool:
        return slab_bytes(nbytes) + self._promised_bytes <= self._store.room_bytes - sum(self._unused.values())

    def _forget_evicted(self) -> None:
        for name, nbytes in list(self._unused.items()):
            if nbytes and self._store.find(name) is None:
                del self._unused[name]
