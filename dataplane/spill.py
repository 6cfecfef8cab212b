"""The store's account of its disk tier: the spill budget, and which objects keep a file there.

Bookkeeping and unlinking only; the store's lock guards it. Files are written by the store, outside of its lock. Without
a disk nothing is spilled, and every question is answered with no.
"""

import logging
import time
from collections import OrderedDict

from dataplane.disk import Disk, DiskFile, charge_bytes
from dataplane.entries import Entry
from dataplane.errors import OutOfSpaceError
from dataplane.scopes import Scope

_PAUSE_S = 5.0
"""A disk that refused a file is left alone for so long."""

log = logging.getLogger(__name__)


class Spill:
    """Budget and files of the disk tier."""

    def __init__(self, disk: Disk | None) -> None:
        self.disk = disk
        self.used_bytes = 0
        self.losable: OrderedDict[str, Entry] = OrderedDict()
        """Spilled objects that may be lost, oldest first."""
        self.last_error = ""
        self._paused_until = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is a disk that takes files now."""
        return self.disk is not None and time.monotonic() >= self._paused_until

    @property
    def budget_bytes(self) -> int:
        """What the files may take."""
        return self.disk.budget_bytes if self.disk is not None else 0

    def could_take(self, nbytes: int) -> bool:
        """Whether an object might find room, perhaps in the place of others that may be lost."""
        losable = sum(entry.file.charge_bytes for entry in self.losable.values() if entry.file is not None)
        return self.is_on and self.used_bytes - losable + charge_bytes(nbytes) <= self.budget_bytes

    def describe(self) -> str:
        """What an error about room says of the disk."""
        if self.disk is None:
            return ", or with --spill DIR"
        trouble = f"; spilling failed: {self.last_error}" if not self.is_on else ""
        return f" or --spill-size (spilled_bytes={self.used_bytes} spill_budget_bytes={self.budget_bytes}){trouble}"

    def reserve(self, nbytes: int) -> bool:
        """Count a file that will be written, if there is room for it."""
        if self.used_bytes + charge_bytes(nbytes) > self.budget_bytes:
            return False
        self.used_bytes += charge_bytes(nbytes)
        return True

    def take_back(self, entry: Entry, file: DiskFile | None) -> None:
        """What was reserved for an object is not used; a file that was written goes."""
        self.used_bytes -= charge_bytes(entry.ref.nbytes)
        if file is not None and self.disk is not None:
            self.disk.remove(file)

    def failed(self, error: OutOfSpaceError) -> None:
        """The disk refused a file."""
        log.error("spilling failed: %s", error)
        self.last_error = str(error)
        self._paused_until = time.monotonic() + _PAUSE_S

    def adopt(self, entry: Entry, file: DiskFile, scope: Scope | None) -> None:
        """A durable file of an object that is there already, written for `scope`; not needed if it has one."""
        assert self.disk is not None
        old = entry.file
        if old is not None and old.is_durable:
            self.used_bytes -= file.charge_bytes
            self.disk.discard(file, scope)
            return
        entry.file = file
        for other in entry.scopes:
            self.keep(entry, other)
        if entry.is_held:
            self.keep(entry, None)
        if old is not None:
            self.used_bytes -= old.charge_bytes
            self.disk.remove(old)

    def keep(self, entry: Entry, scope: Scope | None) -> None:
        """A durable object is kept by a scope, or held."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            self.disk.keep(entry.file.path, scope)

    def let_go(self, entry: Entry, scope: Scope | None) -> None:
        """The reverse of `keep`."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            self.disk.let_go(entry.file.path, scope)

    def forget(self, entry: Entry) -> None:
        """A dropped object does not come back with the next node."""
        self.losable.pop(entry.ref.name, None)
        self.let_go(entry, None)

    def forget_scope(self, scope: Scope) -> None:
        """A scope was closed."""
        if self.disk is not None:
            self.disk.forget_scope(scope)

    def remove(self, entry: Entry) -> None:
        """The file of an object goes."""
        file, entry.file = entry.file, None
        if file is not None and self.disk is not None:
            self.used_bytes -= file.charge_bytes
            self.disk.remove(file)
