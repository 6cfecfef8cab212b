"""The table of resident objects: which of them may be evicted, and which leases and scopes keep them.

Bookkeeping without waiting; the store's lock guards all of it. An object may leave the arena when it has no lease, is
in no open scope, and is not held or has a place on disk. Only objects that may be lost are ever lost.
"""

from collections.abc import Iterable

from dataplane.core.refs import Ref
from dataplane.storage.allocator import Allocator, fits, slab_bytes
from dataplane.storage.disk_files import DiskFile, charge_bytes
from dataplane.storage.entries import Entry, Leased, Slab, Written
from dataplane.storage.eviction import choose_victims
from dataplane.storage.eviction_order import EvictionOrder
from dataplane.storage.leases import Leases
from dataplane.storage.scopes import Scope, Scopes
from dataplane.storage.spill_budget import SpillBudget


class ObjectTable:
    """The sealed objects of a node by name, and the order in which they would be evicted."""

    def __init__(self, capacity: int, spill: SpillBudget) -> None:
        self.spill = spill
        self.allocator = Allocator(capacity)
        self.entries: dict[str, Entry] = {}
        self.leases: Leases[Entry] = Leases()
        self.scopes = Scopes()
        self.num_evicted = 0
        self.scoped_bytes = 0
        self.evictable = EvictionOrder(lambda entry: entry.slab_bytes)
        """Objects that could leave the arena, some of them perhaps only to disk."""

    # -- coming and going ------------------------------------------------------------------------------------------

    def publish(self, item: Written) -> Entry:
        """Turn a written slab into an object. The slab's scope, which keeps the durable file already, becomes the
        object's scope."""
        slab = item.slab
        entry = Entry(item.ref, slab, item.is_held and slab.scope is None, item.digest, file=item.file)
        self.entries[item.ref.name] = entry
        if slab.scope is not None:
            self._enter(entry, slab.scope)
        self.queue_for_eviction(entry)
        return entry

    def merge(self, item: Written, entry: Entry) -> None:
        """Handle an object that was written again: its slab is given back, and the object takes over its scope and its
        hold, and its durable file if the object had none."""
        slab = item.slab
        if item.file is not None:
            self.spill.adopt(entry, item.file)
        self._hand_over(slab, entry)
        if item.is_held and slab.scope is None:
            self.hold(entry)
        self.allocator.free(slab.offset, slab.nbytes)

    def restore(self, ref: Ref, digest: str, file: DiskFile, *, is_held: bool, scopes: Iterable[Scope]) -> Entry:
        """Add a durable object of an earlier node and return its entry."""
        entry = self.entries[ref.name] = Entry(ref, None, is_held, digest, file=file)
        self.spill.count(file)
        for scope in scopes:
            scope.reserve(entry.slab_bytes)
            self._enter(entry, scope)
        return entry

    def hold(self, entry: Entry) -> None:
        """Note that a client stored the object itself: it stays until it is released."""
        entry.is_held = True
        self.spill.keep(entry, None)
        self.update_eviction(entry)

    def unhold(self, entry: Entry) -> None:
        """Undo `hold`: the object may be evicted again."""
        entry.is_held = False
        self.spill.unmark(entry, None)
        self.update_eviction(entry)

    def discard(self, slab: Slab) -> None:
        """Give back a slab that was not sealed."""
        if slab.scope is not None:
            slab.scope.give_back(slab_bytes(slab.nbytes))
        self.allocator.free(slab.offset, slab.nbytes)

    def drop(self, entry: Entry) -> None:
        """Forget the name now, and free the bytes when no lease is left."""
        del self.entries[entry.ref.name]
        self.remove_from_eviction(entry)
        for scope in list(entry.scopes):
            self.leave(entry, scope)
        self.spill.forget(entry)
        entry.is_dropped = True
        if not self.leases.count(entry):
            self._free(entry)

    def after_last_lease(self, unleased: Iterable[Entry]) -> None:
        """Note that the last lease of these entries has ended."""
        for entry in unleased:
            if entry.is_dropped:
                self._free(entry)
            else:
                self.queue_for_eviction(entry)

    # -- scopes ----------------------------------------------------------------------------------------------------

    def join(self, entry: Entry, scope: Scope) -> None:
        """Put an object into a scope, so that it cannot be evicted. A durable file has the scope's mark already."""
        if scope in entry.scopes:
            return
        scope.reserve(entry.slab_bytes)
        self._enter(entry, scope)

    def leave(self, entry: Entry, scope: Scope) -> None:
        """Take an object out of a scope, and do nothing else."""
        if scope not in entry.scopes:
            return
        self.spill.unmark(entry, scope)
        entry.scopes.discard(scope)
        scope.members.discard(entry.ref.name)
        scope.give_back(entry.slab_bytes)
        if not entry.scopes:
            self.scoped_bytes -= entry.slab_bytes

    def close_scope(self, scope: Scope) -> tuple[int, int]:
        """Close a scope; return number and bytes of the plain objects that ended with it. Its other objects may be
        evicted again."""
        self.scopes.close(scope.name)
        num_dropped = dropped_bytes = 0
        for name in sorted(scope.members):
            entry = self.entries[name]
            self.leave(entry, scope)
            if entry.ref.kind == "plain" and not entry.scopes and not entry.is_held:
                num_dropped += 1
                dropped_bytes += entry.ref.nbytes
                self.drop(entry)
            else:
                self.update_eviction(entry)
        self.spill.forget_scope(scope)
        return num_dropped, dropped_bytes

    # -- eviction --------------------------------------------------------------------------------------------------

    def queue_for_eviction(self, entry: Entry) -> None:
        """Make an entry the last to be evicted, if it may be evicted. If its bytes are on disk only, make its file the
        last to be removed."""
        if self._is_evictable(entry):
            self.evictable.add(entry)
        elif entry.slab is None and entry.may_be_lost and not entry.is_dropped and not self.leases.count(entry):
            self.spill.losable.add(entry)

    def remove_from_eviction(self, entry: Entry) -> None:
        """Take an entry out of the eviction orders."""
        self.spill.losable.remove(entry)
        self.evictable.remove(entry)

    def update_eviction(self, entry: Entry) -> None:
        """Put an entry into the right eviction order, after something changed that decides whether it may be
        evicted."""
        if not self._is_evictable(entry):
            self.remove_from_eviction(entry)
        self.queue_for_eviction(entry)

    def make_oldest(self, entry: Entry) -> None:
        """Make an entry the first to be evicted, because no client needs it any more."""
        for order in (self.evictable, self.spill.losable):
            order.make_oldest(entry.ref.name)

    def make_room(self, nbytes: int, session: str) -> list[Leased] | None:
        """Evict until one free range is long enough, old objects before young ones. Return None if nothing can be done.

        Objects that must be written to disk first are returned with a lease of `session`; `end_spill` ends the lease.
        """
        victims = self._choose(nbytes)
        to_write = []
        has_gone = False
        for entry in victims:
            if entry.file is not None:
                self.remove_from_eviction(entry)
                self._leave_arena(entry)
                has_gone = True
            elif self.spill.is_on and self.reserve_file(entry.ref.nbytes):
                self.remove_from_eviction(entry)
                to_write.append(Leased(entry, self.leases.grant(entry, session)))
            elif entry.may_be_lost:
                self.drop(entry)
                self.num_evicted += 1
                has_gone = True
        return to_write if to_write or has_gone else None

    def end_spill(self, leased: Leased, file: DiskFile | None, session: str) -> None:
        """Finish a spill: the object was written to `file`, or could not be. It leaves the arena unless it is needed
        there."""
        entry = leased.entry
        unleased = self.leases.end([leased.lease], session)
        if file is None or entry.is_dropped or entry.scopes or not unleased:
            self.spill.take_back(entry, file)
            self.after_last_lease(unleased)
            if file is None and unleased and entry.may_be_lost and not entry.is_dropped:
                self.drop(entry)
                self.num_evicted += 1
            return
        if entry.file is not None:  # the object became durable meanwhile
            self.spill.take_back(entry, file)
        else:
            entry.file = file
        self._leave_arena(entry)

    def reserve_file(self, nbytes: int) -> bool:
        """Reserve room in the spill budget for another file; return False if there is none. The oldest files that may
        be lost make room, if that is enough."""
        if not self.spill.may_fit(nbytes):
            return False
        while not self.spill.reserve(nbytes):
            self.drop(next(iter(self.spill.losable)))
            self.num_evicted += 1
        return True

    # -- numbers ---------------------------------------------------------------------------------------------------

    @property
    def leased_bytes(self) -> int:
        """The bytes of the arena that leases keep in place."""
        return sum(entry.slab_bytes for entry in self.leases.targets() if entry.slab is not None)

    def leased_bytes_of(self, session: str) -> int:
        """Return the bytes of the arena that the leases of one session keep in place."""
        return sum(entry.slab_bytes for entry in self.leases.targets_of(session) if entry.slab is not None)

    @property
    def held_bytes(self) -> int:
        """The bytes of objects that stay until a client releases them."""
        return sum(entry.slab_bytes for entry in self.entries.values() if entry.is_held and entry.slab)

    @property
    def room_bytes(self) -> int:
        """The bytes of `evictable` objects that can go now: each may be lost, or has a file or room for one."""
        free = to_write = 0
        takes_bytes = self.spill.takes_bytes
        for entry in self.evictable:
            if entry.may_be_lost or entry.file is not None:
                free += entry.slab_bytes
            elif charge_bytes(entry.ref.nbytes) <= takes_bytes:
                to_write += entry.slab_bytes
        return free + min(to_write, takes_bytes)

    # -- private ---------------------------------------------------------------------------------------------------

    def _choose(self, nbytes: int) -> list[Entry]:
        free = self.allocator.capacity - self.allocator.used_bytes
        if not self.evictable or slab_bytes(nbytes) > free + self.evictable.total_bytes:
            return []
        slabs: list[Slab] = []
        entries: list[Entry] = []
        takes_bytes = self.spill.takes_bytes
        for entry in self.evictable:
            if entry.slab is None or not (
                entry.may_be_lost or entry.file or charge_bytes(entry.ref.nbytes) <= takes_bytes
            ):
                continue
            if not entries and fits(*self.allocator.room_around(entry.slab.offset, entry.slab.nbytes), nbytes):
                return [entry]
            slabs.append(entry.slab)
            entries.append(entry)
        ranges = [(slab.offset, slab.offset + slab_bytes(slab.nbytes)) for slab in slabs]
        chosen = choose_victims(self.allocator.free_ranges, ranges, lambda start, end: fits(start, end, nbytes))
        return [entries[at] for at in chosen]

    def _leave_arena(self, entry: Entry) -> None:
        assert entry.slab is not None and entry.file is not None
        self.allocator.free(entry.slab.offset, entry.slab.nbytes)
        entry.slab = None
        self.queue_for_eviction(entry)

    def _is_evictable(self, entry: Entry) -> bool:
        if entry.slab is None or entry.scopes or entry.is_dropped or self.leases.count(entry):
            return False
        return not entry.is_held or entry.file is not None or self.spill.disk is not None

    def _hand_over(self, slab: Slab, entry: Entry) -> None:
        """Count the slab's reserved bytes as the object's from now on; or no longer at all, if the scope counts the
        object already."""
        scope = slab.scope
        if scope is None:
            return
        if scope in entry.scopes:
            scope.give_back(slab_bytes(slab.nbytes))
        else:
            self.spill.keep(entry, scope)
            self._enter(entry, scope)

    def _enter(self, entry: Entry, scope: Scope) -> None:
        if not entry.scopes:
            self.scoped_bytes += entry.slab_bytes
        entry.scopes.add(scope)
        scope.members.add(entry.ref.name)
        self.remove_from_eviction(entry)

    def _free(self, entry: Entry) -> None:
        """Free the bytes of an entry. No reader can see them any more."""
        if entry.slab is not None:
            self.allocator.free(entry.slab.offset, entry.slab.nbytes)
            entry.slab = None
        self.spill.remove(entry)
