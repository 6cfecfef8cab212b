"""Group commit: files are made durable together. A writer that comes while a sync runs shares the next sync."""

import errno
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.core.disk_sync import sync_directory, sync_file


@dataclass(slots=True, eq=False)
class _Batch:
    files: list[tuple[Path, Path]] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)
    is_done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """Syncs files, renames them to their final names, and then syncs the folders: once for all files of a batch."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = _Batch()
        self._is_syncing = False

    def commit(self, temporary: Path, path: Path, folders: Iterable[Path]) -> None:
        """Rename `temporary` to `path`, durably. Waits for: at most two syncs. Raises OSError if one of them fails."""
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
                sync_file(temporary)
                temporary.replace(path)
            for folder in batch.folders:
                # the folder of a scope that was just closed: no object can be sealed into it
                with suppress(FileNotFoundError):
                    sync_directory(folder)
        # after any error, the writers of this batch must not take their files for synced
        except BaseException as error:
            batch.error = error
            if not isinstance(error, OSError):
                raise
        finally:
            with self._turn:
                batch.is_done = True
                self._is_syncing = False
                self._turn.notify_all()
