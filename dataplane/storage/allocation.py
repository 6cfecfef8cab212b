"""Allocation of slabs in the store's arena. It asks the object table to evict, spills what must be kept, and waits for
room. Thread-safe."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from dataplane.core.errors import OutOfSpaceError
from dataplane.core.units import format_bytes
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.disk_tier import DiskTier
from dataplane.storage.entries import Leased, Slab
from dataplane.storage.object_table import ObjectTable
from dataplane.storage.scopes import Scope
from dataplane.storage.store_lock import StoreLock
from dataplane.storage.turns import Turns


class StoreAllocation:
    """The allocator of a store. It shares the store's lock and object table. Leases of `session` keep objects in place
    while they are spilled.
    """

    def __init__(self, table: ObjectTable, lock: StoreLock, disk: DiskTier, session: str) -> None:
        self._table = table
        self._lock = lock
        self._disk = disk
        self._session = session
        self._turns = Turns()
        self.describe_keepers: Callable[[], str] = str
        """Returns who keeps memory without using it, for the error that there is no room. It is called without the
        store's lock. An empty text: no client does."""

    def allocate(self, sizes: Sequence[int], deadline: float, scope: str | None) -> list[Slab]:
        """Return one slab per size, or wait for room until `deadline`. `Store.allocate_many` explains the arguments and
        errors."""
        wanted = sum(map(slab_bytes, sizes))
        capacity = self._table.allocator.capacity
        if wanted > capacity:
            what = "an object" if len(sizes) == 1 else f"{len(sizes)} objects"
            raise OutOfSpaceError(
                f"{what} of {format_bytes(sum(sizes))} can never fit a node of {format_bytes(capacity)}; start the "
                "node with more --memory"
            )
        slabs: list[Slab] = []
        ticket = object()
        try:
            while to_write := self._fill(slabs, sizes, deadline, scope, ticket):
                self._disk.spill(to_write, self._session)
        except BaseException as error:
            with self._lock:
                for slab in slabs:
                    self._table.discard(slab)
                self._lock.changed()
            if isinstance(error, OutOfSpaceError) and ticket in self._turns and (keepers := self.describe_keepers()):
                raise OutOfSpaceError(f"{error}; {keepers}") from None
            raise
        finally:
            if ticket in self._turns:
                with self._lock:
                    self._turns.leave(ticket)
                    self._lock.changed()  # those that left the room to this one
        return slabs

    def _fill(
        self, slabs: list[Slab], sizes: Sequence[int], deadline: float, scope: str | None, ticket: object
    ) -> list[Leased]:
        """Append slabs until there is one for each size, or return the objects that must be written to disk first."""
        wanted = sum(map(slab_bytes, sizes))
        with self._lock:
            were_seen = bool(slabs)
            while len(slabs) < len(sizes):
                opened = self._table.scopes.find(scope) if scope is not None else None
                if opened is not None:
                    opened.check_ever_fits(wanted)
                turn_ends = self._turns.of_another(ticket, time.monotonic())
                is_held_back = not slabs and time.monotonic() < turn_ends < deadline
                found = None if is_held_back else self._find_place(sizes[len(slabs)], opened)
                if isinstance(found, Slab):
                    slabs.append(found)
                    continue
                if found:
                    return found
                if found is not None:
                    continue
                nbytes, has_room = sum(sizes), opened is None or opened.has_room(slab_bytes(sizes[len(slabs)]))
                while slabs:
                    self._table.discard(slabs.pop())
                if were_seen:  # without waiting callers nothing must be woken; waking others anyway would never end
                    self._lock.changed()
                were_seen = False
                shortage = partial(self._describe_shortage, nbytes)
                if opened is not None and not has_room:
                    shortage = partial(opened.describe_shortage, wanted)
                else:
                    self._turns.enter(ticket, time.monotonic())
                wake_at = turn_ends if is_held_back else self._table.spill.paused_until
                self._lock.wait(deadline, shortage, wake_at)
        return []

    def _find_place(self, nbytes: int, scope: Scope | None) -> Slab | list[Leased] | None:
        """Return a slab, or the objects that must be written to disk first, or None if there is no room now. An empty
        list means: call this again."""
        wanted = slab_bytes(nbytes)
        if scope is not None and not scope.has_room(wanted):
            return None
        offset = self._table.allocator.allocate(nbytes)
        if offset is None:
            return self._table.make_room(nbytes, self._session)
        if scope is not None:
            scope.reserve(wanted)
        return Slab(offset, nbytes, scope)

    def _describe_shortage(self, nbytes: int) -> str:
        table, allocator = self._table, self._table.allocator
        return (
            f"no room for {format_bytes(nbytes)}: wanted_bytes={slab_bytes(nbytes)} "
            f"free_bytes={allocator.capacity - allocator.used_bytes} "
            f"largest_free_bytes={allocator.largest_free_bytes} leased_bytes={table.leased_bytes} "
            f"scoped_bytes={table.scoped_bytes} held_bytes={table.held_bytes} "
            f"evictable_bytes={table.room_bytes} budget_bytes={allocator.capacity}; release plain objects, "
            f"drop views, close scopes, or start the node with more --memory{table.spill.describe()}"
        )
