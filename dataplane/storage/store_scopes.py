"""The scopes of a store: opening, filling and closing them, and waiting for room in their quotas. Thread-safe."""

from collections.abc import Sequence
from functools import partial

from dataplane.storage.disk_tier import DiskTier
from dataplane.storage.entries import Entry
from dataplane.storage.object_table import ObjectTable
from dataplane.storage.scopes import Scope
from dataplane.storage.store_lock import StoreLock


class StoreScopes:
    """The part of a store that handles scopes. It shares the store's lock and object table."""

    def __init__(self, table: ObjectTable, lock: StoreLock, disk: DiskTier) -> None:
        self._table = table
        self._lock = lock
        self._disk = disk

    def open(self, name: str, quota_bytes: int | None = None, *owners: str) -> None:
        """Open a scope, or join one that is open with the same quota. `owners` keep it open (see `Scope`)."""
        with self._lock:
            opened = self._table.scopes.open(name, quota_bytes, owners)
        disk = self._table.spill.disk
        if disk is not None:
            disk.update_scope(opened)

    def close(self, name: str) -> tuple[int, int]:
        """Close a scope; return number and bytes of the plain objects that ended with it. MissingObjectError if it is
        not open."""
        with self._lock:
            ended = self._table.close_scope(self._table.scopes.find(name))
            self._lock.changed()
            return ended

    def leave(self, owner: str) -> list[str]:
        """Note that `owner` is gone. Close the scopes that no client keeps open any more, and return their names."""
        with self._lock:
            orphans = self._table.scopes.leave(owner)
            for scope in orphans:
                self._table.close_scope(scope)
            self._lock.changed()
            return [scope.name for scope in orphans]

    def join(self, names: Sequence[str], scope: str, deadline: float) -> list[str]:
        """Put objects into a scope, in addition to whatever else keeps them. Return the names that are not resident.
        All of the objects join, or none.

        Waits for: room in the quota, and the disk if some of the objects are durable.
        """
        kept: set[Entry] = set()
        kept_in: Scope | None = None
        try:
            while True:
                with self._lock:
                    opened, entries = self._wait_for_room(names, scope, deadline)
                    if opened is not kept_in:  # the scope was closed and opened again
                        kept, kept_in = set(), opened
                    to_keep = [entry for entry in entries if entry.is_durable and entry not in kept]
                    if not to_keep:
                        for entry in entries:
                            self._table.join(entry, opened)
                        self._lock.changed()
                        return [name for name in names if name not in self._table.entries]
                self._disk.keep(to_keep, opened)
                kept.update(to_keep)
        finally:
            self._disk.unmark(kept, kept_in)

    def _wait_for_room(self, names: Sequence[str], scope: str, deadline: float) -> tuple[Scope, list[Entry]]:
        table = self._table
        while True:
            opened = table.scopes.find(scope)
            entries = [table.entries[name] for name in set(names) if name in table.entries]
            wanted = sum(entry.slab_bytes for entry in entries if opened not in entry.scopes)
            opened.check_ever_fits(wanted)
            if opened.has_room(wanted):
                return opened, entries
            self._lock.wait(deadline, partial(opened.describe_shortage, wanted))
