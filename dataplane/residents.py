"""Which objects are resident, which of them may be evicted, and what else they hold on to: leases and scopes.

Bookkeeping without waiting; the store's lock guards all of it. An object may be evicted when nobody leases it, it is in
no open scope, and nobody holds it.
"""

from collections import OrderedDict
from collections.abc import Iterable

from dataplane.allocator import Allocator, fits, slab_bytes
from dataplane.entries import Entry, Slab
from dataplane.eviction import choose_victims
from dataplane.leases import Leases
from dataplane.refs import Ref
from dataplane.scopes import Scope, Scopes


class Residents:
    """The sealed objects of a node by name, and the order in which they would be evicted."""

    def __init__(self, capacity: int) -> None:
        self.allocator = Allocator(capacity)
        self.entries: dict[str, Entry] = {}
        self.leases: Leases[Entry] = Leases()
        self.scopes = Scopes()
        self.num_evicted = 0
        self.scoped_bytes = 0
        self.evictable_bytes = 0
        self._evictable: OrderedDict[str, Entry] = OrderedDict()

    # -- coming and going ------------------------------------------------------------------------------------------

    def publish(self, slab: Slab, ref: Ref, *, is_held: bool, digest: str) -> Entry:
        """A written slab becomes an object; the slab's scope becomes its scope."""
        entry = Entry(ref, slab, is_held, digest)
        self.entries[ref.name] = entry
        self._hand_over(slab, entry)
        self.file(entry)
        return entry

    def again(self, slab: Slab, entry: Entry, *, is_held: bool) -> None:
        """The same object came again: its slab is given back, its scope and its hold count."""
        self._hand_over(slab, entry)
        self.allocator.free(slab.offset, slab.nbytes)
        entry.is_held = entry.is_held or is_held
        self.refile(entry)

    def give_up(self, slab: Slab) -> None:
        """Give back a slab that was not sealed."""
        if slab.scope is not None:
            slab.scope.used_bytes -= slab_bytes(slab.nbytes)
        self.allocator.free(slab.offset, slab.nbytes)

    def drop(self, entry: Entry) -> None:
        """Forget the name now, and the bytes when nobody leases them."""
        del self.entries[entry.ref.name]
        self.unfile(entry)
        for scope in list(entry.scopes):
            self.leave(entry, scope)
        entry.is_dropped = True
        if not self.leases.count(entry):
            self._free(entry)

    def settle(self, unleased: Iterable[Entry]) -> None:
        """The last lease of these has ended."""
        for entry in unleased:
            if entry.is_dropped:
                self._free(entry)
            else:
                self.file(entry)

    # -- scopes ----------------------------------------------------------------------------------------------------

    def join(self, entry: Entry, scope: Scope) -> None:
        """Put an object into a scope; it cannot be evicted any more."""
        if scope in entry.scopes:
            return
        scope.used_bytes += entry.slab_bytes
        self._enter(entry, scope)

    def leave(self, entry: Entry, scope: Scope) -> None:
        """Take an object out of a scope, and nothing else."""
        if scope not in entry.scopes:
            return
        entry.scopes.discard(scope)
        scope.members.discard(entry.ref.name)
        scope.used_bytes -= entry.slab_bytes
        if not entry.scopes:
            self.scoped_bytes -= entry.slab_bytes

    def close_scope(self, scope: Scope) -> tuple[int, int]:
        """Close a scope: number and bytes of the plain objects that ended with it. The others may be evicted again."""
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
                self.refile(entry)
        return num_dropped, dropped_bytes

    # -- eviction --------------------------------------------------------------------------------------------------

    def file(self, entry: Entry) -> None:
        """Put an entry at the young end of the eviction order, if it may be evicted."""
        name = entry.ref.name
        if self._is_evictable(entry) and name not in self._evictable:
            self._evictable[name] = entry
            self.evictable_bytes += entry.slab_bytes

    def unfile(self, entry: Entry) -> None:
        """Take an entry out of the eviction order."""
        if self._evictable.pop(entry.ref.name, None) is not None:
            self.evictable_bytes -= entry.slab_bytes

    def refile(self, entry: Entry) -> None:
        """Something that decides whether an entry may be evicted has changed."""
        if self._is_evictable(entry):
            self.file(entry)
        else:
            self.unfile(entry)

    def make_oldest(self, entry: Entry) -> None:
        """Nobody wants it any more: let it be evicted first."""
        if entry.ref.name in self._evictable:
            self._evictable.move_to_end(entry.ref.name, last=False)

    def evict_for(self, nbytes: int) -> bool:
        """Evict what makes one long enough range, old objects before young ones; nothing if that cannot be."""
        free = self.allocator.capacity - self.allocator.used_bytes
        if not self._evictable or slab_bytes(nbytes) > free + self.evictable_bytes:
            return False
        oldest = next(iter(self._evictable.values()))
        victims = [oldest]
        if not fits(*self.allocator.room_around(oldest.slab.offset, oldest.slab.nbytes), nbytes):
            entries = list(self._evictable.values())
            ranges = [(e.slab.offset, e.slab.offset + slab_bytes(e.slab.nbytes)) for e in entries]
            chosen = choose_victims(self.allocator.free_ranges, ranges, lambda start, end: fits(start, end, nbytes))
            victims = [entries[at] for at in chosen]
        for entry in victims:
            self.drop(entry)
        self.num_evicted += len(victims)
        return bool(victims)

    # -- numbers ---------------------------------------------------------------------------------------------------

    @property
    def leased_bytes(self) -> int:
        """Bytes of the arena that leases keep."""
        return sum(entry.slab_bytes for entry in self.leases.targets())

    @property
    def held_bytes(self) -> int:
        """Bytes of objects that stay until somebody releases them."""
        return sum(entry.slab_bytes for entry in self.entries.values() if entry.is_held)

    # -- private ---------------------------------------------------------------------------------------------------

    def _is_evictable(self, entry: Entry) -> bool:
        return not (entry.is_held or entry.scopes or entry.is_dropped or self.leases.count(entry))

    def _hand_over(self, slab: Slab, entry: Entry) -> None:
        """What was reserved for the slab now counts for the object, or not at all if it counted already."""
        scope = slab.scope
        if scope is None:
            return
        if scope in entry.scopes:
            scope.used_bytes -= slab_bytes(slab.nbytes)
        else:
            self._enter(entry, scope)

    def _enter(self, entry: Entry, scope: Scope) -> None:
        if not entry.scopes:
            self.scoped_bytes += entry.slab_bytes
        entry.scopes.add(scope)
        scope.members.add(entry.ref.name)
        self.unfile(entry)

    def _free(self, entry: Entry) -> None:
        self.allocator.free(entry.slab.offset, entry.slab.nbytes)
