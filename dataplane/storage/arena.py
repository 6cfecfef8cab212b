"""The arena's segment: one pre-faulted shared-memory file in `/dev/shm` that a node owns while it runs.

The file is private to the user (0600), and its name is unique for each run. Its owner holds an exclusive lock on it,
which the system releases when the owner dies in any way. So a later node knows which segments it may remove.
"""

import fcntl
import logging
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dataplane.core.errors import OutOfSpaceError
from dataplane.core.shared_files import PREFIX, PRESENCE, SHM_DIR, identity
from dataplane.core.units import format_bytes
from dataplane.storage.numa import NumaPolicy

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PREFAULT_STEP = 256 * 1024 * 1024
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; mmap has no name for it in Python 3.11

log = logging.getLogger(__name__)


class Segment:
    """A mapped segment that its owner may write. Readers open the file `path` read-only."""

    def __init__(self, capacity: int, node_id: str, shm_dir: Path = SHM_DIR, numa: NumaPolicy | None = None) -> None:
        """Reserve and touch `capacity` bytes now, so that later no page faults and no memory runs out.

        Where `shm_dir` is missing or too small, the segment is memory without a file name, and a warning says so.
        Raises OutOfSpaceError where the machine has too little memory for that too.
        """
        shortage = _shortage(capacity, shm_dir)
        self.capacity = capacity
        self._named: Path | None = None
        if shortage:
            _check_memory(capacity, shortage)
            log.warning(
                "%s; the node takes memory outside of it instead, which workers in other containers cannot map (they "
                "copy over Flight): give the container a larger /dev/shm (docker run --shm-size), or ask for less "
                "with --memory",
                shortage,
            )
            self._fd = os.memfd_create(f"{PREFIX}{node_id}", os.MFD_CLOEXEC)
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        else:
            self.path, self._fd = _create_locked(shm_dir, node_id)
            self._named = self.path
        try:
            os.ftruncate(self._fd, capacity)
            self.map = mmap.mmap(self._fd, capacity)
            self.bytes = np.frombuffer(self.map, np.uint8)
            self.address = self.bytes.__array_interface__["data"][0]
            if numa is not None:
                numa.apply(self.address, capacity)
            os.posix_fallocate(self._fd, 0, capacity)
            _prefault(self.map, capacity)
        except BaseException as error:
            self.unlink()
            if not isinstance(error, OSError):
                raise
            raise OutOfSpaceError(
                f"{self.path.parent} could not give {format_bytes(capacity)} ({error.strerror}); "
                "ask for less with --memory, or give the container a larger /dev/shm (docker run --shm-size)"
            ) from error
        self._identity = identity(self._fd)

    def describe(self) -> dict[str, Any]:
        """Return path, size, device and inode: readers need them to map the segment and to check that it is this
        one."""
        return {"path": str(self.path), "nbytes": self.capacity, **self._identity}

    @property
    def is_named(self) -> bool:
        """True if the arena is a file in the folder of segments, False if it is memory without a name."""
        return self._named is not None

    def unlink(self) -> None:
        """Remove the file and release the lock. Processes that still map the memory keep it."""
        if self._named is not None:
            self._named.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def reap_dead_segments(shm_dir: Path = SHM_DIR) -> list[str]:
    """Unlink this user's segments whose owner is dead; return their names.

    Every user of the machine may create files there with any name. A file that is not this user's, or that cannot be
    removed, is left alone.
    """
    reaped = []
    for path in shm_dir.glob(f"{PREFIX}{os.getuid()}-*"):
        if PRESENCE in path.name:
            continue  # it goes with its arena; opening it here could drop a lock that this process holds on it
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(fd)
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                continue  # its owner removed it between opening and locking
            for left in (*shm_dir.glob(f"{path.name}{PRESENCE}*"), path):
                left.unlink(missing_ok=True)
            reaped.append(path.name)
        except BlockingIOError:
            pass  # its owner is alive
        except OSError as error:
            log.warning("%s of a dead node stays: %s", path, error)
        finally:
            os.close(fd)
    if reaped:
        log.warning("removed %d segment(s) that dead nodes left in %s", len(reaped), shm_dir)
    return reaped


def _shortage(capacity: int, shm_dir: Path) -> str:
    """Return the reason why the segment cannot be a file in `shm_dir`, or an empty string if it can."""
    if not shm_dir.is_dir():
        return f"{shm_dir} does not exist; wanted {format_bytes(capacity)} there"
    space = os.statvfs(shm_dir)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    if capacity <= free:
        return ""
    return f"{shm_dir} has {format_bytes(free)} free of {format_bytes(total)}; wanted {format_bytes(capacity)}"


def _check_memory(capacity: int, shortage: str) -> None:
    """Raise OutOfSpaceError if the machine has too little memory, before the system kills a process for it."""
    available = psutil.virtual_memory().available
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    if limit.isdigit():
        available = min(available, int(limit))
    if capacity > available:
        raise OutOfSpaceError(
            f"{shortage}, and the machine has only {format_bytes(available)} of memory available: ask for less with "
            "--memory, or give the container a larger /dev/shm (docker run --shm-size)"
        )


def _create_locked(shm_dir: Path, node_id: str) -> tuple[Path, int]:
    """Create a file and lock it. If another node removed the file between the two (it removes by name), create another
    one."""
    while True:
        path = shm_dir / f"{PREFIX}{os.getuid()}-{node_id}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return path, fd
        except BlockingIOError:
            pass
        os.close(fd)
        path.unlink(missing_ok=True)


def _prefault(segment: mmap.mmap, capacity: int) -> None:
    """Have the system provide every page now. On systems that cannot do this, each page is provided when it is first
    used."""
    for start in range(0, capacity, _PREFAULT_STEP):
        try:
            segment.madvise(_POPULATE_WRITE, start, min(_PREFAULT_STEP, capacity - start))
        except OSError:
            log.info("this kernel has no MADV_POPULATE_WRITE; pages fault in on first use")
            return
