"""Making files durable together: whoever writes while a sync runs shares the next one."""

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True, eq=False)
class _Batch:
    files: list[tuple[Path, Path]] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)
    is_done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """Syncs files, then gives them their names, then syncs the folders, once for all that came meanwhile."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = _Batch()
        self._is_syncing = False

    def commit(self, temporary: Path, path: Path, folders: Iterable[Path]) -> None:
        """`temporary` becomes `path`, durably. Waits for: at most two syncs. Raises OSError where one fails."""
        with self._turn:
            batch = self._next
            batch.files.append((temporary, path))
            batch.folders.update(folders)
            while self._is_syncing and not batch.is_done:
                self._turn.wait()
            if not batch.is_done:
                self._is_syncing = True
                self._next = _Batch()
        if not batch.is_done:
            self._lead(batch)
        if batch.error is not None:
            code = batch.error.errno if isinstance(batch.error, OSError) else errno.EIO
            raise OSError(code, f"the sync of files failed: {batch.error}") from batch.error

    def _lead(self, batch: _Batch) -> None:
        try:
            for temporary, path in batch.files:
                _sync(temporary, os.O_RDONLY)
                temporary.replace(path)
            for folder in batch.folders:
                with suppress(FileNotFoundError):  # of a scope that was just closed: nothing can be sealed into it
                    sync_directory(folder)
        except BaseException as error:  # whatever it is, nobody may take this batch for synced
            batch.error = error
            if not isinstance(error, OSError):
                raise
        finally:
            with self._turn:
                batch.is_done = True
                self._is_syncing = False
                self._turn.notify_all()


def sync_directory(folder: Path) -> None:
    """The names in a folder are on the disk when this returns."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
