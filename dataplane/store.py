"""The objects of one node: names, places in the arena, leases, eviction and back-pressure.

Thread-safe. It moves no bytes itself: a writer allocates a slab, writes into it and seals it under a name. An object
that can be made again (its lineage names a dataset, or it is derived) is evicted, least recently used first, when room
is wanted and nobody leases it. A *held* object (plain, or a source that somebody put by hand) stays until released.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from dataplane.allocator import Allocator, fits, slab_bytes
from dataplane.errors import OutOfSpaceError, StreamLostError
from dataplane.eviction import choose_victims
from dataplane.leases import Leases
from dataplane.refs import Ref
from dataplane.segment import Segment
from dataplane.sizes import format_bytes

INTERNAL_SESSION = f"node-{secrets.token_hex(16)}"
"""A secret: whoever knew it could end leases that the node itself relies on."""


@dataclass(frozen=True, slots=True)
class Slab:
    """A place in the arena that is being written; seal it or give it up."""

    offset: int
    nbytes: int
    generation: int


@dataclass(slots=True, eq=False)
class Entry:
    """A sealed object."""

    ref: Ref
    slab: Slab
    is_held: bool
    is_dropped: bool = False
    digest: str = ""
    """BLAKE3 of the content where somebody computed it already; else empty."""


@dataclass(frozen=True, slots=True)
class Leased:
    """An entry and the lease that keeps it."""

    entry: Entry
    lease: int


class Store:
    """All sealed objects of a node, over one segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.num_evicted = 0
        self._allocator = Allocator(segment.capacity)
        self._entries: dict[str, Entry] = {}
        self._evictable: OrderedDict[str, Entry] = OrderedDict()
        self._evictable_bytes = 0
        self._leases: Leases[Entry] = Leases()
        self._leases.open_session(INTERNAL_SESSION)
        self._generation = 0
        self._room = threading.Condition()
        self._ended: SimpleQueue[int | None] = SimpleQueue()
        self._reclaimer = threading.Thread(target=self._reclaim, name="reclaimer", daemon=True)
        self._reclaimer.start()

    def close(self) -> None:
        """Stop the thread that takes back internal leases."""
        self._ended.put(None)
        self._reclaimer.join(timeout=5)

    # -- writing ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> Slab:
        """A slab for `nbytes`; evicts, then waits for leases and holds to end, until `deadline` (monotonic).

        Waits for: `end_leases`, `end_session`, `release`, `abort`. Raises OutOfSpaceError with the numbers.
        """
        if slab_bytes(nbytes) > self.segment.capacity:
            raise OutOfSpaceError(
                f"an object of {format_bytes(nbytes)} can never fit a node of {format_bytes(self.segment.capacity)}; "
                "start the node with more --memory"
            )
        with self._room:
            while True:
                offset = self._allocator.allocate(nbytes)
                if offset is not None:
                    self._generation += 1
                    return Slab(offset, nbytes, self._generation)
                if self._evict_for(nbytes):
                    continue
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._room.wait(remaining):
                    raise OutOfSpaceError(self._describe_shortage(nbytes))

    def abort(self, slab: Slab) -> None:
        """Give back a slab that was not sealed."""
        with self._room:
            self._free(slab)

    def seal(self, slab: Slab, ref: Ref, *, is_held: bool) -> Entry:
        """Publish a written slab under `ref.name`. If the name exists, the slab is given back and the first stays."""
        with self._room:
            entry = self._entries.get(ref.name)
            if entry is None:
                return self._publish(slab, ref, is_held)
            self._free(slab)
            self._set_held(entry, entry.is_held or is_held)
            return entry

    def seal_new(self, slab: Slab, ref: Ref) -> Entry | None:
        """Publish a held object if its name is free; None, and nothing done, if it is taken."""
        with self._room:
            return None if ref.name in self._entries else self._publish(slab, ref, True)

    def view(self, slab: Slab) -> np.ndarray:
        """The slab's bytes, writable: for the node itself only."""
        return self.segment.bytes[slab.offset : slab.offset + slab.nbytes]

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Entry | None:
        """The entry of a name that is resident now (it may be evicted a moment later: lease it)."""
        with self._room:
            return self._entries.get(name)

    def lease(self, names: Sequence[str], session: str) -> list[Leased | None]:
        """Lease what is resident of `names`, None in the place of the rest."""
        granted: list[Leased | None] = []
        with self._room:
            if not self._leases.has_session(session):
                raise StreamLostError(
                    f"session {session!r} is not open on this node: the node restarted, or the session's stream broke; "
                    "make a new Reader"
                )
            for name in names:
                entry = self._entries.get(name)
                if entry is None:
                    granted.append(None)
                    continue
                self._unfile(entry)
                granted.append(Leased(entry, self._leases.grant(entry, session)))
        return granted

    def lease_one(self, name: str) -> Leased | None:
        """A lease of the node itself; end it with `end_later` (safe in a finaliser) or `end_leases`."""
        return self.lease([name], INTERNAL_SESSION)[0]

    def open_session(self, session: str) -> None:
        """Begin a reader's session."""
        with self._room:
            self._leases.open_session(session)

    def end_session(self, session: str) -> None:
        """End a reader's session and every lease it still has."""
        with self._room:
            self._settle(self._leases.end_session(session))

    def end_leases(self, leases: Iterable[int], session: str) -> None:
        """End leases of a session; numbers that are not its own are ignored."""
        with self._room:
            self._settle(self._leases.end(leases, session))

    def end_later(self, lease: int) -> None:
        """End an internal lease from a finaliser: never blocks."""
        self._ended.put(lease)

    def release(self, names: Iterable[str]) -> int:
        """Drop plain objects and let the others be evicted first; returns how many names were resident.

        A leased object goes when its last lease ends, but its name is free at once.
        """
        count = 0
        with self._room:
            for name in names:
                entry = self._entries.get(name)
                if entry is None:
                    continue
                count += 1
                if entry.ref.kind == "plain":
                    self._drop(entry)
                else:
                    self._set_held(entry, False)
                    if name in self._evictable:
                        self._evictable.move_to_end(name, last=False)
            self._room.notify_all()
        return count

    def stat(self) -> dict[str, int]:
        """Counts and bytes, all taken at one moment."""
        with self._room:
            return {
                "used_bytes": self._allocator.used_bytes,
                "budget_bytes": self.segment.capacity,
                "largest_free_bytes": self._allocator.largest_free_bytes,
                "evictable_bytes": self._evictable_bytes,
                "leased_bytes": self._leased_bytes(),
                "num_objects": len(self._entries),
                "num_leases": len(self._leases),
                "num_readers": self._leases.num_sessions - 1,
                "num_evicted": self.num_evicted,
            }

    # -- private: the lock is held ---------------------------------------------------------------------------------

    def _publish(self, slab: Slab, ref: Ref, is_held: bool) -> Entry:
        entry = Entry(ref, slab, is_held)
        self._entries[ref.name] = entry
        self._file(entry)
        self._room.notify_all()
        return entry

    def _evict_for(self, nbytes: int) -> bool:
        """Evict what makes one long enough range, old objects before young ones; nothing if that cannot be."""
        free = self.segment.capacity - self._allocator.used_bytes
        if not self._evictable or slab_bytes(nbytes) > free + self._evictable_bytes:
            return False
        oldest = next(iter(self._evictable.values()))
        victims = [oldest]
        if not fits(*self._allocator.room_around(oldest.slab.offset, oldest.slab.nbytes), nbytes):
            entries = list(self._evictable.values())
            ranges = [(e.slab.offset, e.slab.offset + slab_bytes(e.slab.nbytes)) for e in entries]
            chosen = choose_victims(self._allocator.free_ranges, ranges, lambda start, end: fits(start, end, nbytes))
            victims = [entries[at] for at in chosen]
        for entry in victims:
            self._drop(entry)
        self.num_evicted += len(victims)
        return bool(victims)

    def _file(self, entry: Entry) -> None:
        """Put an entry at the young end of the eviction order, if it may be evicted."""
        name = entry.ref.name
        if not entry.is_held and not entry.is_dropped and name not in self._evictable:
            self._evictable[name] = entry
            self._evictable_bytes += slab_bytes(entry.slab.nbytes)

    def _unfile(self, entry: Entry) -> None:
        if self._evictable.pop(entry.ref.name, None) is not None:
            self._evictable_bytes -= slab_bytes(entry.slab.nbytes)

    def _set_held(self, entry: Entry, is_held: bool) -> None:
        entry.is_held = is_held
        if is_held:
            self._unfile(entry)
        elif not self._leases.count(entry):
            self._file(entry)

    def _drop(self, entry: Entry) -> None:
        """Forget the name now, and the bytes when nobody leases them."""
        del self._entries[entry.ref.name]
        self._unfile(entry)
        entry.is_dropped = True
        if not self._leases.count(entry):
            self._free(entry.slab)

    def _settle(self, unleased: Iterable[Entry]) -> None:
        for entry in unleased:
            if entry.is_dropped:
                self._free(entry.slab)
            else:
                self._file(entry)
        self._room.notify_all()

    def _free(self, slab: Slab) -> None:
        self._allocator.free(slab.offset, slab.nbytes)
        self._room.notify_all()

    def _leased_bytes(self) -> int:
        return sum(slab_bytes(entry.slab.nbytes) for entry in self._leases.targets())

    def _describe_shortage(self, nbytes: int) -> str:
        capacity, used = self.segment.capacity, self._allocator.used_bytes
        leased = self._leased_bytes()
        return (
            f"no room for {format_bytes(nbytes)}: wanted_bytes={slab_bytes(nbytes)} free_bytes={capacity - used} "
            f"largest_free_bytes={self._allocator.largest_free_bytes} leased_bytes={leased} "
            f"evictable_bytes={self._evictable_bytes} budget_bytes={capacity}; release plain objects, drop views, "
            "or start the node with more --memory"
        )

    def _reclaim(self) -> None:
        """Consumes `end_later`; ends with `close`."""
        while (lease := self._ended.get()) is not None:
            self.end_leases([lease], INTERNAL_SESSION)
