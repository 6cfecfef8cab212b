"""The objects of one node: writing, reading, leases, scopes, and back-pressure when there is no room.

Thread-safe. It moves no bytes itself: a writer allocates a slab, writes into it and seals it under a name. An object
that can be made again (its lineage names a dataset, or it is derived) is evicted, least recently used first, when room
is wanted, nobody leases it and it is in no open scope. A *held* object (plain, or a source that somebody put by hand)
stays until it is released, and a plain object in scopes until the last of them closes.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from queue import SimpleQueue

import numpy as np

from dataplane.allocator import slab_bytes
from dataplane.digests import content_digest
from dataplane.disk import Disk, DiskFile, charge_bytes
from dataplane.entries import Entry, Leased, Slab
from dataplane.errors import BadRequestError, ChecksumError, MissingObjectError, OutOfSpaceError, StreamLostError
from dataplane.refs import Ref
from dataplane.residents import Residents
from dataplane.scopes import Scope
from dataplane.segment import Segment
from dataplane.sizes import format_bytes
from dataplane.spill import Spill

log = logging.getLogger(__name__)

INTERNAL_SESSION = f"node-{secrets.token_hex(16)}"
"""A secret: whoever knew it could end leases that the node itself relies on."""


class Store:
    """All sealed objects of a node, over one segment."""

    def __init__(self, segment: Segment, disk: Disk | None = None) -> None:
        self.segment = segment
        self._disk = disk
        self._residents = Residents(segment.capacity, Spill(disk))
        self._residents.leases.open_session(INTERNAL_SESSION)
        self._num_own_sessions = 1
        self._room = threading.Condition()
        self._ended: SimpleQueue[int | None] = SimpleQueue()
        self._reclaimer = threading.Thread(target=self._reclaim, name="reclaimer", daemon=True)
        self._reclaimer.start()

    def close(self) -> None:
        """Stop the thread that takes back internal leases."""
        self._ended.put(None)
        self._reclaimer.join(timeout=5)

    # -- writing ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float, scope: str | None = None) -> Slab:
        """A slab for `nbytes`; evicts, then waits for leases, holds and scopes to end, until `deadline` (monotonic).

        Waits for: `end_leases`, `end_session`, `release`, `abort`, `close_scope`. Raises OutOfSpaceError with the
        numbers, MissingObjectError if the scope is not open.
        """
        wanted = slab_bytes(nbytes)
        if wanted > self.segment.capacity:
            raise OutOfSpaceError(
                f"an object of {format_bytes(nbytes)} can never fit a node of {format_bytes(self.segment.capacity)}; "
                "start the node with more --memory"
            )
        while True:
            found = self._find_place(nbytes, deadline, scope)
            if isinstance(found, Slab):
                return found
            self._write_to_disk(found)

    def _find_place(self, nbytes: int, deadline: float, scope: str | None) -> Slab | list[Leased]:
        """A slab, or what has to be written to disk before there is one."""
        wanted = slab_bytes(nbytes)
        with self._room:
            while True:
                opened = self._residents.scopes.find(scope) if scope is not None else None
                if opened is not None:
                    opened.check_ever_fits(wanted)
                if opened is None or opened.has_room(wanted):
                    offset = self._residents.allocator.allocate(nbytes)
                    if offset is not None:
                        if opened is not None:
                            opened.used_bytes += wanted
                        return Slab(offset, nbytes, opened)
                    to_write = self._residents.make_room(nbytes, INTERNAL_SESSION)
                    if to_write:
                        return to_write
                    if to_write is not None:
                        continue
                    shortage = self._describe_shortage(nbytes)
                else:
                    shortage = opened.describe_shortage(wanted)
                self._wait_for_room(deadline, shortage)

    def abort(self, slab: Slab) -> None:
        """Give back a slab that was not sealed."""
        with self._room:
            self._residents.give_up(slab)
            self._room.notify_all()

    def write_durable(self, slab: Slab, ref: Ref, digest: str) -> DiskFile:
        """A file of what lies in a slab that is not sealed yet; pass it to the seal. On the disk when this returns.

        BadRequestError where the node has no disk, OutOfSpaceError where the spill budget or the disk is full.
        """
        if self._disk is None:
            raise BadRequestError("this node keeps nothing on disk; start it with --spill DIR, or put without durable")
        with self._room:
            if not self._residents.reserve_file(ref.nbytes):
                spill = self._residents.spill
                raise OutOfSpaceError(
                    f"the spill budget has no room for {ref.name}: wanted_bytes={ref.nbytes} "
                    f"spilled_bytes={spill.used_bytes} spill_budget_bytes={spill.budget_bytes}; release objects, or "
                    "start the node with more --spill-size"
                )
        try:
            return self._disk.write_durable(ref, digest, self.view(slab), slab.scope)
        except BaseException:
            with self._room:
                self._residents.spill.used_bytes -= charge_bytes(ref.nbytes)
            raise

    def discard_file(self, file: DiskFile) -> None:
        """A durable file whose object was not sealed after all."""
        with self._room:
            self._residents.spill.used_bytes -= file.charge_bytes
        if self._disk is not None:
            self._disk.remove(file)

    def seal(self, slab: Slab, ref: Ref, *, is_held: bool, digest: str = "", file: DiskFile | None = None) -> Entry:
        """Publish a written slab under `ref.name`. If the name exists, the slab is given back and the first stays.

        An object that is sealed into a scope is not held besides.
        """
        with self._room:
            self._check_open(slab)
            entry = self._residents.entries.get(ref.name)
            if entry is None:
                is_held = is_held and slab.scope is None
                entry = self._residents.publish(slab, ref, is_held=is_held, digest=digest, file=file)
            else:
                self._residents.again(slab, entry, is_held=is_held and slab.scope is None, file=file)
            self._room.notify_all()
            return entry

    def seal_new(self, slab: Slab, ref: Ref, digest: str = "", file: DiskFile | None = None) -> Entry | None:
        """Publish an object if its name is free; None, and nothing done, if it is taken."""
        with self._room:
            self._check_open(slab)
            if ref.name in self._residents.entries:
                return None
            entry = self._residents.publish(slab, ref, is_held=slab.scope is None, digest=digest, file=file)
            self._room.notify_all()
            return entry

    def seal_again(self, slab: Slab, entry: Entry, file: DiskFile | None = None) -> bool:
        """Give back a slab that holds the same as `entry`, which joins its scope; False if the entry was dropped."""
        with self._room:
            self._check_open(slab)
            if entry.is_dropped:
                return False
            self._residents.again(slab, entry, is_held=slab.scope is None, file=file)
            self._room.notify_all()
            return True

    def view(self, slab: Slab) -> np.ndarray:
        """The slab's bytes, writable: for the node itself only."""
        return self.segment.bytes[slab.offset : slab.offset + slab.nbytes]

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Entry | None:
        """The entry of a name that is resident now (it may be evicted a moment later: lease it)."""
        with self._room:
            return self._residents.entries.get(name)

    def content(self, entry: Entry) -> np.ndarray:
        """The bytes of an object, read-only, wherever they lie. Hold a lease while you look."""
        if entry.slab is None:
            assert self._disk is not None and entry.file is not None
            return self._disk.map(entry.file, entry.ref.nbytes)
        data = self.view(entry.slab)
        data.flags.writeable = False
        return data

    def lease(self, names: Sequence[str], session: str) -> list[Leased | None]:
        """Lease what is resident of `names`, None in the place of the rest."""
        granted: list[Leased | None] = []
        residents = self._residents
        with self._room:
            if not residents.leases.has_session(session):
                raise StreamLostError(
                    f"session {session!r} is not open on this node: the node restarted, or the session's stream broke; "
                    "make a new Reader"
                )
            for name in names:
                entry = residents.entries.get(name)
                if entry is None:
                    granted.append(None)
                    continue
                residents.unfile(entry)
                granted.append(Leased(entry, residents.leases.grant(entry, session)))
        for at, leased in enumerate(granted):
            if leased is not None and leased.entry.slab is None:
                granted[at] = self._check_file(leased, granted, session)
        return granted

    def lease_one(self, name: str) -> Leased | None:
        """A lease of the node itself; end it with `end_later` (safe in a finaliser) or `end_leases`."""
        return self.lease([name], INTERNAL_SESSION)[0]

    def lease_entry(self, entry: Entry) -> Leased:
        """Another lease of the node itself on an object that is leased, whatever became of its name."""
        with self._room:
            return Leased(entry, self._residents.leases.grant(entry, INTERNAL_SESSION))

    def resident(self, prefix: str, limit: int) -> list[Ref]:
        """Up to `limit` objects that are resident now and whose names begin with `prefix`."""
        with self._room:
            found = (entry.ref for name, entry in self._residents.entries.items() if name.startswith(prefix))
            return list(islice(found, limit))

    @property
    def num_leases(self) -> int:
        """Leases of all readers, and of the node itself."""
        return len(self._residents.leases)

    def open_session(self, session: str, *, is_reader: bool = True) -> None:
        """Begin a session: a reader's, or one of the node's own."""
        with self._room:
            self._num_own_sessions += not is_reader
            self._residents.leases.open_session(session)

    def end_session(self, session: str) -> None:
        """End a reader's session and every lease it still has."""
        with self._room:
            self._residents.settle(self._residents.leases.end_session(session))
            self._room.notify_all()

    def end_leases(self, leases: Iterable[int], session: str) -> None:
        """End leases of a session; numbers that are not its own are ignored."""
        with self._room:
            self._residents.settle(self._residents.leases.end(leases, session))
            self._room.notify_all()

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
                entry = self._residents.entries.get(name)
                if entry is None:
                    continue
                count += 1
                if entry.ref.kind == "plain":
                    self._residents.drop(entry)
                else:
                    self._residents.let_go(entry)
                    self._residents.make_oldest(entry)
            self._room.notify_all()
        return count

    # -- scopes ----------------------------------------------------------------------------------------------------

    def open_scope(self, name: str, quota_bytes: int | None = None, *, is_kept: bool = True, owner: str = "") -> None:
        """Open a scope, or join one that is open with the same quota; `owner` keeps it open (see `Scope`)."""
        with self._room:
            self._residents.scopes.open(name, quota_bytes, is_kept, owner)

    def close_scope(self, name: str) -> tuple[int, int]:
        """Close a scope; number and bytes of the plain objects that ended with it. MissingObjectError if not open."""
        with self._room:
            ended = self._residents.close_scope(self._residents.scopes.find(name))
            self._room.notify_all()
            return ended

    def leave_scopes(self, owner: str) -> list[str]:
        """`owner` is gone: close the scopes that nobody keeps open any more; their names."""
        with self._room:
            orphans = self._residents.scopes.leave(owner)
            for scope in orphans:
                self._residents.close_scope(scope)
            self._room.notify_all()
            return [scope.name for scope in orphans]

    def join_scope(self, names: Sequence[str], scope: str, deadline: float) -> list[str]:
        """Put objects into a scope besides whatever else keeps them; returns the names that are not resident.

        Waits for: room in the quota. All of them join, or none.
        """
        with self._room:
            return self._join(names, scope, deadline)[1]

    def move_to_scope(
        self, names: Sequence[str], scope: str, deadline: float, *, source: str | None = None
    ) -> list[str]:
        """As `join_scope`, and out of the scope `source`, or out of their hold where there is no source."""
        with self._room:
            entries, missing = self._join(names, scope, deadline)
            if self._disk is not None and any(entry.file and entry.file.is_durable for entry in entries):
                self._disk.sync_scope(self._residents.scopes.find(scope))
            for entry in entries:
                if source is None:
                    self._residents.let_go(entry)
                elif source != scope:
                    self._residents.leave(entry, self._residents.scopes.find(source))
            self._room.notify_all()
        return missing

    def stat(self) -> dict[str, int]:
        """Counts and bytes, all taken at one moment."""
        residents = self._residents
        with self._room:
            return {
                "used_bytes": residents.allocator.used_bytes,
                "budget_bytes": self.segment.capacity,
                "largest_free_bytes": residents.allocator.largest_free_bytes,
                "evictable_bytes": residents.evictable_bytes,
                "leased_bytes": residents.leased_bytes,
                "scoped_bytes": residents.scoped_bytes,
                "num_objects": len(residents.entries),
                "num_leases": len(residents.leases),
                "num_readers": residents.leases.num_sessions - self._num_own_sessions,
                "num_scopes": len(residents.scopes),
                "num_evicted": residents.num_evicted,
                "spilled_bytes": residents.spill.used_bytes,
                "spill_budget_bytes": residents.spill.budget_bytes,
                "num_spilled": sum(entry.slab is None for entry in residents.entries.values()),
                "num_durable": sum(
                    entry.file is not None and entry.file.is_durable for entry in residents.entries.values()
                ),
            }

    def recover(self) -> set[str]:
        """Take over the durable objects of the nodes that had this directory; the clients whose scopes they are in."""
        owners: set[str] = set()
        with self._room:
            for found in self._disk.recover() if self._disk is not None else ():
                scopes = []
                for state in found.scopes:
                    scope = self._residents.scopes.open(state["name"], state["quota_bytes"], state["keep"], owner="")
                    scope.owners.update(state["owners"])
                    owners.update(state["owners"])
                    scopes.append(scope)
                self._residents.restore(found.ref, found.digest, found.file, is_held=found.is_held, scopes=scopes)
        return owners

    # -- private ---------------------------------------------------------------------------------------------------

    def _write_to_disk(self, victims: Sequence[Leased]) -> None:
        """Spill objects, without the lock; each is leased while it is written."""
        assert self._disk is not None
        for leased in victims:
            entry, file = leased.entry, None
            try:
                entry.digest = entry.digest or content_digest(self.content(entry))
                file = self._disk.write(entry.ref, entry.digest, self.content(entry))
            except OutOfSpaceError as error:
                self._residents.spill.failed(error)
            finally:
                with self._room:
                    self._residents.end_spill(leased, file, INTERNAL_SESSION)
                    self._room.notify_all()

    def _check_file(self, leased: Leased, granted: Sequence[Leased | None], session: str) -> Leased | None:
        """The lease if the file is whole; None if its object can be made again; else ChecksumError, and no lease."""
        entry = leased.entry
        assert self._disk is not None and entry.file is not None
        try:
            self._disk.check(entry.file, entry.ref.nbytes, entry.digest)
            return leased
        except ChecksumError as error:
            is_plain = entry.ref.kind == "plain" or entry.is_held
            log.error("%s is lost: %s", entry.ref.name, error)
            with self._room:
                if not entry.is_dropped:
                    self._residents.drop(entry)
            ended = [item.lease for item in granted if item is not None] if is_plain else [leased.lease]
            self.end_leases(ended, session)
            if is_plain:
                raise ChecksumError(f"{entry.ref.name} is lost: {error}; put it again") from error
            return None

    # -- private: the lock is held ---------------------------------------------------------------------------------

    def _join(self, names: Sequence[str], scope: str, deadline: float) -> tuple[list[Entry], list[str]]:
        residents = self._residents
        while True:
            opened = residents.scopes.find(scope)
            entries = [residents.entries[name] for name in set(names) if name in residents.entries]
            wanted = sum(entry.slab_bytes for entry in entries if opened not in entry.scopes)
            opened.check_ever_fits(wanted)
            if opened.has_room(wanted):
                break
            self._wait_for_room(deadline, opened.describe_shortage(wanted))
        for entry in entries:
            residents.join(entry, opened)
        return entries, [name for name in names if name not in residents.entries]

    def _wait_for_room(self, deadline: float, shortage: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._room.wait(remaining):
            raise OutOfSpaceError(shortage)

    def _check_open(self, slab: Slab) -> None:
        scope: Scope | None = slab.scope
        if scope is not None and not scope.is_open:
            raise MissingObjectError(f"scope {scope.name!r} was closed while an object was being written into it")

    def _describe_shortage(self, nbytes: int) -> str:
        residents, allocator = self._residents, self._residents.allocator
        return (
            f"no room for {format_bytes(nbytes)}: wanted_bytes={slab_bytes(nbytes)} "
            f"free_bytes={allocator.capacity - allocator.used_bytes} "
            f"largest_free_bytes={allocator.largest_free_bytes} leased_bytes={residents.leased_bytes} "
            f"scoped_bytes={residents.scoped_bytes} held_bytes={residents.held_bytes} "
            f"evictable_bytes={residents.evictable_bytes} budget_bytes={allocator.capacity}; release plain objects, "
            f"drop views, close scopes, or start the node with more --memory{residents.spill.describe()}"
        )

    def _reclaim(self) -> None:
        """Consumes `end_later`; ends with `close`."""
        while (lease := self._ended.get()) is not None:
            self.end_leases([lease], INTERNAL_SESSION)
