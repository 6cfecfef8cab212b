"""Presence: a lock on a file of the node, which a client's process holds for as long as it lives.

The end of a connection does not show that a process has ended: gRPC closes the connection of a process that stands
still (stopped by a signal, a debugger, or a frozen container) after about a minute. The kernel drops a POSIX record
lock only when its process has ended, or when the process closes a descriptor of the file. When the lock is free, the
process maps no memory any more. A forked child does not inherit the lock. The lock also works between containers that
share `/dev/shm` but not their process ids.

One file belongs to one session, and the client opens it once, because closing any descriptor of it would drop the lock.
"""

import fcntl
import os
import struct
from collections.abc import Mapping
from typing import Any

from dataplane.core.shared_files import open_segment

_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, process id


class Presence:
    """The presence of this process in one session, from construction until `release` or the end of the process."""

    def __init__(self, shared: Mapping[str, Any]) -> None:
        """Open the file that the node describes (path, nbytes, device, inode) and lock it. Raises OSError if this
        process cannot."""
        self._fd = open_segment(shared, os.O_RDONLY)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def __del__(self) -> None:
        if "_fd" in self.__dict__:
            self.release()

    def release(self) -> None:
        """Drop the lock: this process uses none of the node's memory any more through this session."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def lock_holder(fd: int) -> int | None:
    """Return the id of the process that holds a lock on an open file; None if the lock is free.

    The id is 0 if the process cannot be seen from here, as in another container. Raises OSError if the system cannot
    say. The question is asked as an open file, not as a process, so the locks of this process itself count too.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(0, pid)
