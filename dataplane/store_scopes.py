"""The scopes of a store: opening, filling and closing them, and waiting for room in their quotas. Thread-safe."""

from collections.abc import Sequence

from dataplane.entries import Entry
from dataplane.residents import Residents
from dataplane.room import Room


class StoreScopes:
    """Shares the store's lock and its residents."""

    def __init__(self, residents: Residents, room: Room) -> None:
        self._residents = residents
        self._room = room

    def open(self, name: str, quota_bytes: int | None = None, *, is_kept: bool = True, owner: str = "") -> None:
        """Open a scope, or join one that is open with the same quota; `owner` keeps it open (see `Scope`)."""
        with self._room:
            self._residents.scopes.open(name, quota_bytes, is_kept, owner)

    def close(self, name: str) -> tuple[int, int]:
        """Close a scope; number and bytes of the plain objects that ended with it. MissingObjectError if not open."""
        with self._room:
            ended = self._residents.close_scope(self._residents.scopes.find(name))
            self._room.changed()
            return ended

    def leave(self, owner: str) -> list[str]:
        """`owner` is gone: close the scopes that nobody keeps open any more; their names."""
        with self._room:
            orphans = self._residents.scopes.leave(owner)
            for scope in orphans:
                self._residents.close_scope(scope)
            self._room.changed()
            return [scope.name for scope in orphans]

    def join(self, names: Sequence[str], scope: str, deadline: float) -> list[str]:
        """Put objects into a scope besides whatever else keeps them; returns the names that are not resident.

        Waits for: room in the quota. All of them join, or none.
        """
        with self._room:
            return self._enter(names, scope, deadline)[1]

    def move(self, names: Sequence[str], scope: str, deadline: float, *, source: str | None = None) -> list[str]:
        """As `join`, and out of the scope `source`, or out of their hold where there is no source."""
        with self._room:
            entries, missing = self._enter(names, scope, deadline)
            disk = self._residents.spill.disk
            if disk is not None and any(entry.file and entry.file.is_durable for entry in entries):
                disk.sync_scope(self._residents.scopes.find(scope))
            for entry in entries:
                if source is None:
                    self._residents.let_go(entry)
                elif source != scope:
                    self._residents.leave(entry, self._residents.scopes.find(source))
            self._room.changed()
        return missing

    def _enter(self, names: Sequence[str], scope: str, deadline: float) -> tuple[list[Entry], list[str]]:
        residents = self._residents
        while True:
            opened = residents.scopes.find(scope)
            entries = [residents.entries[name] for name in set(names) if name in residents.entries]
            wanted = sum(entry.slab_bytes for entry in entries if opened not in entry.scopes)
            opened.check_ever_fits(wanted)
            if opened.has_room(wanted):
                break
            self._room.wait(deadline, opened.describe_shortage(wanted))
        for entry in entries:
            residents.join(entry, opened)
        return entries, [name for name in names if name not in residents.entries]
