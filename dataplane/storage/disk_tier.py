"""The disk tier of a store: it spills objects, writes durable files, and takes over the files of an earlier node.
Thread-safe.

Files are written and checked without the store's lock. The writer of a file holds a lease, or a slab that is not sealed
yet.
"""

import errno
import logging
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from dataplane.core.digests import content_digest
from dataplane.core.disk_sync import sync_directory
from dataplane.core.errors import BadRequestError, ChecksumError, OutOfSpaceError, OverloadedError
from dataplane.core.refs import Ref
from dataplane.storage.arena import Segment
from dataplane.storage.disk_files import DiskFile, DiskFiles, charge_bytes
from dataplane.storage.entries import Entry, Leased, Slab
from dataplane.storage.object_table import ObjectTable
from dataplane.storage.scopes import Scope
from dataplane.storage.store_lock import StoreLock

log = logging.getLogger(__name__)


class DiskTier:
    """The part of a store that uses the disk. It shares the store's lock and object table."""

    def __init__(self, table: ObjectTable, lock: StoreLock, disk: DiskFiles | None, segment: Segment) -> None:
        self._table = table
        self._lock = lock
        self._disk = disk
        self._segment = segment

    def write_durable(self, slab: Slab, data: np.ndarray, ref: Ref, digest: str, *, is_synced: bool = True) -> DiskFile:
        """Write a file of a slab that is not sealed yet, and return the file for the seal. With `is_synced` the file is
        on the disk when this returns; else the system writes it later.

        BadRequestError if the node has no disk, OutOfSpaceError if the spill budget or the disk is full.
        """
        if self._disk is None:
            raise BadRequestError("this node keeps nothing on disk; start it with --spill DIR, or put without durable")
        with self._lock:
            if not self._table.reserve_file(ref.nbytes):
                spill = self._table.spill
                raise OutOfSpaceError(
                    f"the spill budget has no room for {ref.name}: wanted_bytes={ref.nbytes} "
                    f"spilled_bytes={spill.used_bytes} spill_budget_bytes={spill.budget_bytes}; release objects, or "
                    "start the node with more --spill-size"
                )
        try:
            return self._disk.write_durable(ref, digest, data, slab.scope, is_synced=is_synced)
        except BaseException:
            with self._lock:
                self._table.spill.give_back(charge_bytes(ref.nbytes))
            raise

    def discard(self, slab: Slab, file: DiskFile) -> None:
        """Remove a durable file whose object was not sealed."""
        with self._lock:
            self._table.spill.give_back(file.charge_bytes)
        if self._disk is not None:
            self._disk.discard(file, slab.scope)

    def keep(self, entries: Iterable[Entry], scope: Scope | None) -> None:
        """Mark durable objects as kept by `scope`, or as held, also after a restart. The marks are on the disk when
        this returns.

        If the disk refuses, this raises OutOfSpaceError and no new mark stays.
        """
        if self._disk is None:
            return
        wanted = [entry for entry in entries if entry.is_durable]
        try:
            folders = {self._disk.keep(entry.file.path, scope) for entry in wanted if entry.file is not None}
            for folder in folders:
                sync_directory(folder)
        except OSError as error:
            self.unmark(wanted, scope)
            raise OutOfSpaceError(f"the disk does not note who keeps an object ({error}); look at it") from error

    def sync(self, entry: Entry) -> None:
        """Wait until the file of a durable object is on the disk. OutOfSpaceError if the disk refuses."""
        file = entry.file
        if self._disk is None or file is None:
            return
        try:
            self._disk.sync(file)
        except FileNotFoundError:
            return  # the object was dropped meanwhile, and the caller finds out
        except OSError as error:
            raise OutOfSpaceError(f"{entry.ref.name} is not synced ({error}); look at the disk") from error

    def unmark(self, entries: Iterable[Entry], scope: Scope | None) -> None:
        """Undo `keep` for objects that are not kept after all."""
        with self._lock:
            for entry in entries:
                if not (entry.is_held if scope is None else scope in entry.scopes):
                    self._table.spill.unmark(entry, scope)

    def recover(self) -> set[str]:
        """Load the durable objects of earlier nodes in this directory into the table. Return the clients whose scopes
        hold them."""
        owners: set[str] = set()
        with self._lock:
            if self._disk is None:
                return owners
            for found in self._disk.recover():
                if found.ref.name in self._table.entries:  # a second file of a name was never acknowledged
                    log.warning("%s has two files; the younger one, %s, goes", found.ref.name, found.file.path)
                    self._disk.forget(found.file)
                    continue
                scopes = []
                for state in found.scopes:
                    scope = self._table.scopes.open(state["name"], state["quota_bytes"], state["owners"])
                    owners.update(state["owners"])
                    scopes.append(scope)
                self._table.restore(found.ref, found.digest, found.file, is_held=found.is_held, scopes=scopes)
        return owners

    def spill(self, victims: Sequence[Leased], session: str) -> None:
        """Spill objects without the lock. A lease keeps each object while it is written."""
        remaining = deque(victims)
        try:
            while remaining:
                leased = remaining[0]
                file = self._write(leased.entry)
                remaining.popleft()
                self._end_spill(leased, file, session)
        finally:
            for leased in remaining:
                self._end_spill(leased, None, session)

    def is_whole(self, entry: Entry) -> bool:
        """Check a leased object's file. If the file is damaged, drop the object, and move a durable file aside.

        Return False if the object is dropped and can be made again. ChecksumError if it cannot be made again;
        OverloadedError if the file cannot be checked now. A place that the disk cannot read counts as damage if the
        object can be made again.
        """
        assert self._disk is not None and entry.file is not None
        is_makeable = entry.ref.kind != "plain" and not entry.is_held
        try:
            self._disk.check(entry.file, entry.ref.nbytes, entry.digest)
        except (ChecksumError, OverloadedError) as error:
            if isinstance(error, OverloadedError) and not (is_makeable and _is_of_the_disk(error)):
                raise
            log.error("%s is lost: %s", entry.ref.name, error)
            self._set_aside(entry.file)
            with self._lock:
                if not entry.is_dropped:
                    self._table.drop(entry)
                    self._lock.changed()
            if not is_makeable:
                raise ChecksumError(f"{entry.ref.name} is lost: {error}; put it again") from error
            return False
        return True

    def _write(self, entry: Entry) -> DiskFile | None:
        """Write the file of an object that must be spilled. Return None if that failed; the object then stays in
        memory."""
        slab = entry.slab
        assert self._disk is not None and slab is not None
        data = self._segment.bytes[slab.offset : slab.offset + slab.nbytes]
        try:
            entry.digest = entry.digest or content_digest(data)
            return self._disk.write(entry.ref, entry.digest, data)
        except Exception as error:
            with self._lock:
                self._table.spill.failed(error)
            return None

    def _end_spill(self, leased: Leased, file: DiskFile | None, session: str) -> None:
        with self._lock:
            self._table.end_spill(leased, file, session)
            self._lock.changed()

    def read(self, entry: Entry, start: int, nbytes: int) -> np.ndarray:
        """Return a copy of some bytes of an object that is on disk only. Raises errors that name the object and its
        file."""
        assert self._disk is not None and entry.file is not None
        try:
            return self._disk.read(entry.file, start, nbytes)
        except (ChecksumError, OverloadedError) as error:
            raise type(error)(f"{entry.ref.name}: {error}") from error

    def _set_aside(self, file: DiskFile) -> None:
        assert self._disk is not None
        try:
            self._disk.set_aside(file)
        except OSError as error:  # forgetting the object now would remove the file
            raise OverloadedError(f"{file.path} is damaged and cannot be set aside now ({error})") from error


def _is_of_the_disk(error: Exception) -> bool:
    """Return True if an error comes from a place that the disk cannot read, and not from a limit of this process."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
