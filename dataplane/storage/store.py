"""The store: the objects of one node. It writes and reads them, grants leases, keeps scopes, and makes writers wait
when there is no room.

Thread-safe. The store moves no bytes itself: a writer allocates a slab, writes into it, and seals it under a name. An
object that can be made again (its lineage names a dataset, or it is derived) is evicted when room is needed, least
recently used first, if it has no lease and is in no open scope. A *held* object (a plain object, or a source that a
client put) stays until it is released, and a plain object in scopes until the last of them closes: in the arena, or on
disk if the node has a disk.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from queue import SimpleQueue

import numpy as np

from dataplane.core.errors import MissingObjectError, SessionLostError
from dataplane.core.refs import Ref
from dataplane.storage.allocation import StoreAllocation
from dataplane.storage.arena import Segment
from dataplane.storage.disk_files import DiskFiles
from dataplane.storage.disk_tier import DiskTier
from dataplane.storage.entries import Entry, Leased, Slab, Written
from dataplane.storage.object_table import ObjectTable
from dataplane.storage.scopes import Scope
from dataplane.storage.spill_budget import SpillBudget
from dataplane.storage.store_lock import StoreLock
from dataplane.storage.store_scopes import StoreScopes

INTERNAL_SESSION = f"node-{secrets.token_hex(16)}"
"""A secret name of the node's own session. A client that knew it could end leases that the node relies on."""

log = logging.getLogger(__name__)


class Store:
    """All sealed objects of a node, over one segment."""

    def __init__(self, segment: Segment, disk: DiskFiles | None = None) -> None:
        self.segment = segment
        self._lock = StoreLock()
        self._table = ObjectTable(segment.capacity, SpillBudget(disk, self._lock.run_after_unlock))
        self._table.leases.open_session(INTERNAL_SESSION)
        self.disk = DiskTier(self._table, self._lock, disk, segment)
        self._allocation = StoreAllocation(self._table, self._lock, self.disk, INTERNAL_SESSION)
        self.scopes = StoreScopes(self._table, self._lock, self.disk)
        self._ended: SimpleQueue[int | None] = SimpleQueue()
        self._reclaimer = threading.Thread(target=self._reclaim, name="reclaimer", daemon=True)
        self._reclaimer.start()

    def close(self) -> None:
        """Stop the thread that ends internal leases."""
        self._ended.put(None)
        self._reclaimer.join(timeout=5)

    def tell_of_keepers(self, describe: Callable[[], str]) -> None:
        """Let `describe` say which clients keep memory without using it, in the errors that there is no room. An empty
        text: none does."""
        self._allocation.describe_keepers = describe

    # -- writing ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float, scope: str | None = None) -> Slab:
        """Return a slab for `nbytes`. Evict objects first, then wait for leases, holds and scopes to end, until
        `deadline` (monotonic).

        Waits for: `end_leases`, `end_session`, `release`, `abort`, `close_scope`. Raises OutOfSpaceError with the
        numbers, MissingObjectError if the scope is not open.
        """
        return self.allocate_many([nbytes], deadline, scope)[0]

    def allocate_many(self, sizes: Sequence[int], deadline: float, scope: str | None = None) -> list[Slab]:
        """Return one slab per size, all or none. A caller that waits holds no slab, so two callers that need many slabs
        never block each other."""
        return self._allocation.allocate(sizes, deadline, scope)

    def abort(self, slab: Slab) -> None:
        """Give back a slab that was not sealed."""
        with self._lock:
            self._table.discard(slab)
            self._lock.changed()

    def publish(self, written: Sequence[Written]) -> list[Entry]:
        """Publish slabs under the names of their refs, all at the same moment, and return their entries. If a name is
        taken, its slab is given back and the existing object stays. If this raises, nothing is published."""
        with self._lock:
            self._check_open(written)
            entries = []
            for item in written:
                entry = self._table.entries.get(item.ref.name)
                if entry is None:
                    entry = self._table.publish(item)
                else:
                    self._table.merge(item, entry)
                entries.append(entry)
            self._lock.changed()
            return entries

    def publish_new(self, written: Sequence[Written]) -> list[Entry | None]:
        """Publish slabs like `publish`, but only those whose names are free. The others stay as they are, with None for
        an entry."""
        with self._lock:
            self._check_open(written)
            entries = [None if item.ref.name in self._table.entries else self._table.publish(item) for item in written]
            self._lock.changed()
            return entries

    def merge(self, item: Written, entry: Entry) -> bool:
        """Give back a slab whose content is the same as that of `entry`. The entry joins the slab's scope and takes
        over the durable file.

        Return False and do nothing if the entry was dropped, or has a durable file by now and needs no other.
        """
        with self._lock:
            self._check_open([item])
            if entry.is_dropped or (item.file is not None and entry.is_durable):
                return False
            entry.digest = entry.digest or item.digest
            self._table.merge(item, entry)
            self._lock.changed()
            return True

    def view(self, slab: Slab) -> np.ndarray:
        """Return the slab's bytes, writable. For the node itself only."""
        return self.segment.bytes[slab.offset : slab.offset + slab.nbytes]

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Entry | None:
        """Return the entry of a name that is resident now. It may be evicted a moment later: lease it."""
        return self.find_all([name])[0]

    def find_all(self, names: Sequence[str]) -> list[Entry | None]:
        """Return the entries of the names that are resident now, like `find`."""
        with self._lock:
            return [self._table.entries.get(name) for name in names]

    def content(self, entry: Entry) -> np.ndarray:
        """Return the bytes of an object, read-only: those in the arena, or a copy of those on the disk. Hold a lease
        while you read."""
        data = self.disk.read(entry, 0, entry.ref.nbytes) if entry.slab is None else self.view(entry.slab)
        data.flags.writeable = False
        return data

    def lease(self, names: Sequence[str], session: str) -> list[Leased | None]:
        """Return leases on the resident objects among `names`; None for the others."""
        table = self._table
        with self._lock:
            if not table.leases.has_session(session):
                raise SessionLostError(
                    f"session {session!r} is not open on this node: the node restarted, or the session has ended"
                )
            entries = [table.entries.get(name) for name in names]
            found = [entry for entry in entries if entry is not None]
            for entry in found:
                table.remove_from_eviction(entry)
            numbers = iter(table.leases.grant_all(found, session))
        granted = [None if entry is None else Leased(entry, next(numbers)) for entry in entries]
        return self._check_files(granted, session)

    def lease_one(self, name: str) -> Leased | None:
        """Return a lease of the node itself. End it with `end_leases`, or from a finaliser with `end_later`."""
        return self.lease([name], INTERNAL_SESSION)[0]

    def resident(self, prefix: str, limit: int) -> list[Ref]:
        """Return up to `limit` objects that are resident now and whose names begin with `prefix`."""
        with self._lock:
            found = (entry.ref for name, entry in self._table.entries.items() if name.startswith(prefix))
            return list(islice(found, limit))

    @property
    def room_bytes(self) -> int:
        """The bytes of the arena that are free, or that eviction can free."""
        with self._lock:
            allocator = self._table.allocator
            return allocator.capacity - allocator.used_bytes + self._table.evictable.total_bytes

    def make_youngest(self, names: Iterable[str]) -> None:
        """Make objects the last to be evicted."""
        with self._lock:
            for name in names:
                self._table.evictable.make_youngest(name)

    @property
    def num_leases(self) -> int:
        """The number of leases of all readers and of the node itself."""
        return len(self._table.leases)

    def open_session(self, session: str) -> None:
        """Begin a reader's session."""
        with self._lock:
            self._table.leases.open_session(session)

    def end_session(self, session: str) -> None:
        """End a reader's session and every lease that it still has."""
        with self._lock:
            self._table.after_last_lease(self._table.leases.end_session(session))
            self._lock.changed()

    def leased_bytes_of(self, session: str) -> int:
        """Return the bytes of the arena that the leases of a session keep in place."""
        with self._lock:
            return self._table.leased_bytes_of(session)

    def end_leases(self, leases: Iterable[int], session: str) -> None:
        """End leases of a session. Numbers of other sessions are ignored."""
        with self._lock:
            self._table.after_last_lease(self._table.leases.end(leases, session))
            self._lock.changed()

    def end_later(self, lease: int) -> None:
        """End an internal lease from a finaliser. Never blocks."""
        self._ended.put(lease)

    def release(self, names: Iterable[str]) -> int:
        """Drop plain objects, and make the others the first to be evicted. Return how many of the names were resident.

        A leased object goes when its last lease ends, but its name is free at once.
        """
        count = 0
        with self._lock:
            for name in names:
                entry = self._table.entries.get(name)
                if entry is None:
                    continue
                count += 1
                if entry.ref.kind == "plain":
                    self._table.drop(entry)
                else:
                    self._table.unhold(entry)
                    self._table.make_oldest(entry)
            self._lock.changed()
        return count

    def stat(self) -> dict[str, int]:
        """Return counts and bytes, all taken at one moment."""
        table = self._table
        with self._lock:
            return {
                "used_bytes": table.allocator.used_bytes,
                "budget_bytes": self.segment.capacity,
                "largest_free_bytes": table.allocator.largest_free_bytes,
                "evictable_bytes": table.evictable.total_bytes,
                "leased_bytes": table.leased_bytes,
                "scoped_bytes": table.scoped_bytes,
                "num_objects": len(table.entries),
                "num_leases": len(table.leases),
                "num_readers": table.leases.num_sessions - 1,
                "num_scopes": len(table.scopes),
                "num_evicted": table.num_evicted,
                "spilled_bytes": table.spill.used_bytes,
                "spill_budget_bytes": table.spill.budget_bytes,
                "num_spilled": sum(entry.slab is None for entry in table.entries.values()),
                "num_durable": sum(entry.is_durable for entry in table.entries.values()),
            }

    def _check_files(self, granted: list[Leased | None], session: str) -> list[Leased | None]:
        """Return the leases without those of damaged files. If one object is lost for good or cannot be read, end all
        the leases and raise."""
        for at, leased in enumerate(granted):
            if leased is None or leased.entry.slab is not None:
                continue
            try:
                is_whole = self.disk.is_whole(leased.entry)
            except BaseException:
                self.end_leases([item.lease for item in granted if item is not None], session)
                raise
            if not is_whole:
                self.end_leases([leased.lease], session)
                granted[at] = None
        return granted

    # -- private: the lock is held ---------------------------------------------------------------------------------

    def _check_open(self, written: Iterable[Written]) -> None:
        for item in written:
            scope: Scope | None = item.slab.scope
            if scope is not None and not scope.is_open:
                raise MissingObjectError(f"scope {scope.name!r} was closed while an object was being written into it")

    def _reclaim(self) -> None:
        """The thread that ends the leases of `end_later`, in batches. It stops at `close`."""
        while (lease := self._ended.get()) is not None:
            leases = [lease]
            while not self._ended.empty() and (lease := self._ended.get()) is not None:
                leases.append(lease)
            try:
                self.end_leases(leases, INTERNAL_SESSION)
            except Exception:  # this thread must live: it ends the leases of all later calls too
                log.exception("ending %d leases failed", len(leases))
            if lease is None:
                return
