"""What was made ahead of demand and not asked for yet: counted, and never pushed out by more of its kind.

Prefetching fills the arena up to where it would have to evict what it made itself; demand may evict that like anything
else. It waits for no room.
"""

import threading
import time

from dataplane.core.errors import OutOfSpaceError
from dataplane.core.units import format_bytes
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.store import INTERNAL_SESSION, Slab, Store

WINDOW = 1024
"""How many objects may wait for being made ahead."""


class PrefetchedObjects:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._unused: dict[str, int] = {}
        """Bytes of the arena, by name; 0 while an object is being made."""
        self._promised_bytes = 0
        """Of places that are being allocated now."""
        self._num_made = 0
        self._num_hits = 0
        self._num_refused = 0

    def begin(self, name: str) -> None:
        """An object is about to be made ahead."""
        with self._lock:
            self._unused[name] = 0

    def end(self, name: str, nbytes: int | None) -> None:
        """It was made with so many bytes; None: it was not."""
        with self._lock:
            self._num_made += nbytes is not None
            if nbytes is None:
                self._unused.pop(name, None)
            elif name in self._unused:  # else somebody has asked for it already
                self._unused[name] = slab_bytes(nbytes)

    def note_refusal(self) -> None:
        """There was no room for one, and those behind it were called off."""
        with self._lock:
            self._num_refused += 1

    def use(self, name: str) -> None:
        """Somebody asks for an object, whoever had it made."""
        with self._lock:
            self._num_hits += self._unused.pop(name, None) is not None

    def allocate(self, nbytes: int) -> Slab:
        """A place, if nothing that was made ahead and not used must go for it; else OutOfSpaceError."""
        with self._lock:
            if not self._has_room(nbytes):
                self._forget_evicted()
                if not self._has_room(nbytes):
                    raise OutOfSpaceError(f"no room for {format_bytes(nbytes)} but that of what was prefetched before")
            self._promised_bytes += slab_bytes(nbytes)
            unused = list(self._unused)
        try:  # without the lock: it may write to disk, and everybody who asks for an object needs the lock
            if slab_bytes(nbytes) > self._store.stat()["largest_free_bytes"]:
                self._make_young(unused)
            return self._store.allocate(nbytes, time.monotonic())
        finally:
            with self._lock:
                self._promised_bytes -= slab_bytes(nbytes)

    def stat(self) -> dict[str, int]:
        """Objects made ahead, how many of them were asked for, and how often room was wanting."""
        with self._lock:
            return {
                "num_prefetched": self._num_made,
                "num_prefetch_hits": self._num_hits,
                "num_prefetch_refused": self._num_refused,
            }

    def _has_room(self, nbytes: int) -> bool:
        found = self._store.stat()
        room = found["budget_bytes"] - found["used_bytes"] + found["evictable_bytes"] - sum(self._unused.values())
        return slab_bytes(nbytes) + self._promised_bytes <= room

    def _forget_evicted(self) -> None:
        for name, nbytes in list(self._unused.items()):
            if nbytes and self._store.find(name) is None:
                del self._unused[name]

    def _make_young(self, unused: list[str]) -> None:
        """Let everything else be evicted before what nobody has used yet."""
        leased = self._store.lease(unused, INTERNAL_SESSION)
        self._store.end_leases([found.lease for found in leased if found is not None], INTERNAL_SESSION)
