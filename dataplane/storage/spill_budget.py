"""The store's account of its disk tier: the spill budget, and which objects have a file there.

It only counts, and the store's lock guards it. The disk writes and removes files and marks outside of that lock.
Without a disk nothing is spilled, and no method has an effect.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

from dataplane.core.errors import OutOfSpaceError
from dataplane.storage.disk_files import DiskFile, DiskFiles, charge_bytes
from dataplane.storage.entries import Entry
from dataplane.storage.eviction_order import EvictionOrder
from dataplane.storage.scopes import Scope

_PAUSE_S = 5.0
"""After the disk refused a file, no file is written for this time."""

log = logging.getLogger(__name__)


class SpillBudget:
    """The budget and the files of the disk tier."""

    def __init__(self, disk: DiskFiles | None, run_after_unlock: Callable[[Callable[[], None]], None]) -> None:
        self.disk = disk
        self._run_after_unlock = run_after_unlock
        self.used_bytes = 0
        self.losable = EvictionOrder(lambda entry: charge_bytes(entry.ref.nbytes))
        """Spilled objects that may be lost."""
        self.last_error = ""
        self.paused_until = 0.0
        """The monotonic time from which the disk is used again after it refused a file."""

    @property
    def is_on(self) -> bool:
        """True if there is a disk that takes files now."""
        return self.disk is not None and time.monotonic() >= self.paused_until

    @property
    def budget_bytes(self) -> int:
        """The bytes that all files together may take."""
        return self.disk.budget_bytes if self.disk is not None else 0

    @property
    def takes_bytes(self) -> int:
        """The size in bytes of the largest file that might fit now, if files that may be lost make room; 0 for a while
        after a write that failed."""
        return self._left_bytes if self.is_on else 0

    def may_fit(self, nbytes: int) -> bool:
        """Return True if an object fits the budget, perhaps after files that may be lost made room."""
        return charge_bytes(nbytes) <= self._left_bytes

    @property
    def _left_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes + self.losable.total_bytes

    def describe(self) -> str:
        """Return the sentence about the disk for an error about room."""
        if self.disk is None:
            return ", or with --spill DIR"
        trouble = f"; spilling failed: {self.last_error}" if not self.is_on else ""
        return f" or --spill-size (spilled_bytes={self.used_bytes} spill_budget_bytes={self.budget_bytes}){trouble}"

    def reserve(self, nbytes: int) -> bool:
        """Count a file that will be written, and return True, if there is room for it; otherwise return False."""
        if self.used_bytes + charge_bytes(nbytes) > self.budget_bytes:
            return False
        self.used_bytes += charge_bytes(nbytes)
        return True

    def count(self, file: DiskFile) -> None:
        """Count a file of an earlier node."""
        self.used_bytes += file.charge_bytes

    def give_back(self, num_charged_bytes: int) -> None:
        """Give back the room of a file that was not written, or is gone."""
        self.used_bytes -= num_charged_bytes

    def take_back(self, entry: Entry, file: DiskFile | None) -> None:
        """Give back the reserved room of an object, and remove a file that was written."""
        self.give_back(charge_bytes(entry.ref.nbytes))
        if file is not None:
            self._remove(file)

    def failed(self, error: Exception) -> None:
        """Note that the disk refused a file."""
        log.error("spilling failed: %s", error, exc_info=not isinstance(error, OutOfSpaceError))
        self.last_error = str(error) or type(error).__name__
        self.paused_until = time.monotonic() + _PAUSE_S

    def adopt(self, entry: Entry, file: DiskFile) -> None:
        """Make `file` the durable file of an object that exists already and had none."""
        old = entry.file
        assert old is None or not old.is_durable
        entry.file = file
        for other in entry.scopes:
            self.keep(entry, other)
        if entry.is_held:
            self.keep(entry, None)
        if old is not None:
            self.give_back(old.charge_bytes)
            self._remove(old)

    def keep(self, entry: Entry, scope: Scope | None) -> None:
        """Mark a durable object as kept by `scope`, or as held. The caller must do this before it promises to keep the
        object, because the disk may refuse."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            try:
                self.disk.keep(entry.file.path, scope)
            except OSError as error:
                where = f"scope {scope.name!r}" if scope is not None else "what is held"
                log.error("%s will not be in %s after a restart: %s", entry.ref.name, where, error)

    def unmark(self, entry: Entry, scope: Scope | None) -> None:
        """Note on the disk that `scope` no longer keeps the object's durable file; with None, that no client holds
        it."""
        if self.disk is not None and entry.file is not None and entry.file.is_durable:
            self.disk.unmark(entry.file.path, scope)
            self._run_after_unlock(self.disk.remove_unwanted)

    def forget(self, entry: Entry) -> None:
        """Remove the marks of a dropped object, so that the next node does not recover it."""
        self.losable.remove(entry)
        self.unmark(entry, None)

    def forget_scope(self, scope: Scope) -> None:
        """Note that a scope was closed."""
        if self.disk is not None:
            self.disk.forget_scope(scope)
            self._run_after_unlock(self.disk.remove_unwanted)

    def remove(self, entry: Entry) -> None:
        """Remove the file of an object."""
        file, entry.file = entry.file, None
        if file is not None and self.disk is not None:
            self.give_back(file.charge_bytes)
            self._remove(file)

    def _remove(self, file: DiskFile) -> None:
        """Unlink the file without the store's lock, because that takes long for big files."""
        assert self.disk is not None
        self._run_after_unlock(partial(_unlink, self.disk, file))


def _unlink(disk: DiskFiles, file: DiskFile) -> None:
    try:
        disk.remove(file)
    except OSError as error:
        log.error("%s stays on the disk: %s", file.path, error)
