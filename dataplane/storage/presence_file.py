"""The file on which the client of one session holds its lock (`dataplane/core/presence.py`). The node makes it beside
the arena, so that every process that can map the arena can open it."""

import os
import secrets
from pathlib import Path
from typing import Any

from dataplane.core.presence import lock_holder
from dataplane.core.shared_files import PREFIX, PRESENCE, identity
from dataplane.storage.arena import Segment


class PresenceFile:
    """An empty file for the lock of one session. It has a name until the client has opened it."""

    def __init__(self, segment: Segment) -> None:
        self._named: Path | None = None
        if segment.is_named:
            self._path = self._named = Path(f"{segment.path}{PRESENCE}{secrets.token_hex(4)}")
            self._fd = os.open(self._named, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        else:
            self._fd = os.memfd_create(f"{PREFIX}presence", os.MFD_CLOEXEC)
            self._path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def describe(self) -> dict[str, Any]:
        """Return path, size, device and inode of the file, which the client needs for opening it."""
        return {"path": str(self._path), "nbytes": 0, **identity(self._fd)}

    def holder(self) -> int | None:
        """Return the id of the process that holds the lock, 0 if it cannot be seen from here; None if it is free."""
        return lock_holder(self._fd)

    def hide(self) -> None:
        """Remove the name of the file. The lock stays."""
        if self._named is not None:
            self._named.unlink(missing_ok=True)
            self._named = None

    def close(self) -> None:
        """Remove and close the file. Calling this twice is safe."""
        self.hide()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
