"""The files that ended parsers. Such a file is not parsed again, or only after a while.

A crash of the parser lasts until the file changes. If the process was killed or took too long, the machine may be at
fault, so the file is tried again after `EXPIRY_S`.
"""

import signal
import threading
import time
from dataclasses import dataclass

from dataplane.core.errors import DatasetError
from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.range_files import RangeFile

EXPIRY_S = 600.0
MAX_FILES = 10_000
MAX_ENDED = 2
"""The number of processes that a file may end."""
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL)


@dataclass(frozen=True, slots=True)
class _Record:
    num_ended: int
    reason: str
    until: float | None
    """The time (monotonic) from which the file may be tried again; None for never."""


class BadFiles:
    """The files that ended parsers, by path, size and version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: LruCache[_Record] = LruCache(MAX_FILES)

    def check(self, file: RangeFile) -> None:
        """Raise DatasetError if the file is not to be tried."""
        with self._lock:
            record = self._records.get(file)
            if record is None or record.num_ended < MAX_ENDED:
                return
            if record.until is not None and time.monotonic() >= record.until:
                self._records.take(file)
                return
            raise DatasetError(record.reason)

    def note_death(self, file: RangeFile, code: int | None) -> DatasetError:
        """Count a process that ended on this file with this exit status, and return the error to raise."""
        name = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        if code in _CRASHES:
            return self._note(file, f"{file.path} crashed the parser ({name}); it is left alone until it changes", None)
        how = f"the parser ended ({name}) while it read {file.path}"
        return self._note(file, f"{how}; the file is tried again after {EXPIRY_S:.0f} s", EXPIRY_S)

    def note_overdue(self, file: RangeFile, limit_s: float) -> DatasetError:
        """Count a process that took longer than `limit_s` and was ended, and return the error to raise."""
        reason = f"{file.path} could not be parsed in {limit_s:.0f} s, which is the limit for it"
        return self._note(file, reason, EXPIRY_S)

    def _note(self, file: RangeFile, reason: str, lasts_s: float | None) -> DatasetError:
        with self._lock:
            record = self._records.get(file)
            num_ended = 1 + (record.num_ended if record is not None else 0)
            until = None if lasts_s is None else time.monotonic() + lasts_s
            self._records.put(file, _Record(num_ended, reason, until))
        return DatasetError(reason)
