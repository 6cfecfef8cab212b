"""The store's account of its disk tier: the spill budget, and which objects keep a file there.

Bookkeeping and unlinking only; the store's lock guards it. Files are written by the store, outside of its lock. Without
a disk nothing is spilled, and every question is answered with no.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from dataplane.core.errors import OutOfSpaceError
from dataplane.storage.disk_files import DiskFile, DiskFiles, charge_bytes
from dataplane.storage.entries import Entry
from dataplane.storage.scopes import Scope

_PAUSE_S = 5.0
"""A disk that refused a file is left alone for so long."""

log = logging.getLogger(__name__)


class SpillBudget:
    """Budget and files of the disk tier."""

    def __init__(self, disk: DiskFiles | None, later: Callable[[Callable[[], None]], None]) -> None:
        self.disk = disk
        self._later = later
        self.used_bytes = 0
        self.losable: OrderedDict[str, Entry] = OrderedDict()
        """Spilled objects that may be lost, oldest first."""
        self._losable_bytes = 0
        self.last_error = ""
        self.paused_until = 0.0
        """Monotonic: the disk, which refused a file, is asked again from then on."""

    @property
    def is_on(self) -> bool:
        """Whether there is a disk that takes files now."""
        return self.disk is not None and time.monotonic() >= self.paused_until

    @property
    def budget_bytes(self) -> int:
        """What the files may take."""
        return self.disk.budget_bytes if self.disk is not None else 0

    @property
    def takes_bytes(self) -> int:
        """The largest file that might find room now, perhaps in the place of others that may be lost."""
        return self.budget_bytes - self.used_bytes + self._losable_bytes if self.is_on else 0

    def add_losable(self, entry: Entry) -> None:
        """A spilled object may be lost from now on."""
        if entry.ref.name not in self.losable:
            self.losable[entry.ref.name] = entry
            self._losable_bytes += charge_bytes(entry.ref.nbytes)

    def remove_losable(self, entry: Entry) -> None:
        """It may not, or it is."""
        if self.losable.pop(entry.ref.name, None) is not None:
            self._losable_bytes -= charge_bytes(entry.ref.nbytes)

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
        if file is not None:
            self._remove(file)

    def failed(self, error: Exception) -> None:
        """The disk refused a file."""
        log.error("spilling failed: %s", error, exc_info=not isinstance(error, OutOfSpaceError))
        self.last_error = str(error) or type(error).__name__
        self.paused_until = time.monotonic() + _PAUSE_S

    def adopt(self, entry: Entry, file: DiskFile) -> None:
        """An object that is there already gets a durable file, its first."""
        old = entry.file
        assert old is None or not old.is_durable
        entry.file = file
        for other in entry.scopes:
            self.keep(entry, other)
        if entry.is_held:
            self.keep(entry, None)
        if old is not None:
            self.used_bytes -= old.charge_bytes
            self._remove(old)

    def keep(self, entry: Entry, scope: Scope | None) -> None:
        """A durable object is kept by a scope, or held. Who promises that makes sure of it before: this may fail."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            try:
                self.disk.keep(entry.file.path, scope)
            except OSError as error:
                where = f"scope {scope.name!r}" if scope is not None else "what is held"
                log.error("%s will not be in %s after a restart: %s", entry.ref.name, where, error)

    def let_go(self, entry: Entry, scope: Scope | None) -> None:
        """The reverse of `keep`."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            try:
                self.disk.let_go(entry.file.path, scope)
            except OSError as error:
                log.error("%s may come back after a restart: %s", entry.ref.name, error)

    def forget(self, entry: Entry) -> None:
        """A dropped object does not come back with the next node."""
        self.remove_losable(entry)
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
            self._remove(file)

    def _remove(self, file: DiskFile) -> None:
        """Unlink it without the store's lock: that takes long for big files."""
        assert self.disk is not None
        self._later(partial(_unlink, self.disk, file))


def _unlink(disk: DiskFiles, file: DiskFile) -> None:
    try:
        disk.remove(file)
    except OSError as error:
        log.error("%s stays on the disk: %s", file.path, error)
