"""Open and map the files that a node shares with other processes: its arena, and the files of spilled objects.

Every file is checked before it is opened. In another container the same path can mean another file, so device and inode
must match. The process at an address may not be a node at all. Therefore an arena is opened only at a path where arenas
of this user can be, and a spilled object only if its file belongs to this user.
"""

import ctypes
import errno
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_FIXED, _FIXED_NOREPLACE, _NORESERVE = 0x10, 0x100000, 0x4000  # MAP_*, for which `mmap` has no names in Python 3.11

SHM_DIR = Path("/dev/shm")
"""The folder of the segments."""
PREFIX = "dataplane-"
"""The beginning of every segment's name, both of files in `SHM_DIR` and of unnamed memory (memfd)."""
PRESENCE = ".presence-"
"""What follows a segment's path in the names of the files on which its clients hold locks."""
FILE_SUFFIX = ".arrow"
"""The end of the file name of every spilled object."""
_MEMFD = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
"""The pattern of the path of another process's unnamed memory (memfd)."""


def identity(fd: int) -> dict[str, int]:
    """Return the device and inode of an open file, which together identify the file on this machine."""
    found = os.fstat(fd)
    return {"device": found.st_dev, "inode": found.st_ino}


class FileMapping:
    """The first `nbytes` bytes of a file, mapped until the last array over them is gone. The mapping is read-only
    unless `is_writable`.

    Unlike `mmap.mmap` and `np.memmap`, this class keeps no file descriptor open: thousands of mapped objects would use
    up the descriptors of a process. Raises OSError if the system allows no more mappings.
    """

    __slots__ = ("__array_interface__", "__weakref__", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, flags: int = mmap.MAP_SHARED, *, is_writable: bool = False) -> None:
        self.nbytes = 0
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self.address, self.nbytes = _map_memory(None, nbytes, rights, flags, fd), nbytes
        data = (self.address, not is_writable)
        self.__array_interface__ = {"data": data, "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self.nbytes:
            _libc.munmap(self.address, self.nbytes)


def open_own_file(shared: Mapping[str, Any]) -> int:
    """Open a file that this process wrote and described itself, and return the descriptor. Raises OSError if the file
    is gone, or is another one, or has another size."""
    return _open(shared, os.O_RDONLY, os.O_NOFOLLOW)


def map_file(shared: Mapping[str, Any]) -> FileMapping:
    """Map the whole file of a spilled object. `shared` has the path, nbytes, device and inode of the file.

    Raises OSError if the file cannot be opened from here, is not a spilled object of this user, or the system allows no
    more mappings.
    """
    if not str(shared["path"]).endswith(FILE_SUFFIX):
        raise _stale(shared, f"its name does not end in {FILE_SUFFIX}")
    fd = _open(shared, os.O_RDONLY, os.O_NOFOLLOW, _check_owner)
    try:
        return FileMapping(fd, shared["nbytes"])
    finally:
        os.close(fd)


def cover_memory(address: int, nbytes: int, *, replaces: bool) -> None:
    """Put memory that cannot be read or written at an address: over what is there if `replaces`, otherwise only if
    nothing is there. Raises OSError if the system refuses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | (_FIXED if replaces else _FIXED_NOREPLACE)
    _map_memory(address, nbytes, 0, flags, -1)


def open_segment(shared: Mapping[str, Any], flags: int) -> int:
    """Open the segment that a node describes (path, nbytes, device, inode), and return the file descriptor.

    Raises OSError if the segment cannot be opened from here, is another file, or was not made by a node of this user.
    """
    path = str(shared["path"])
    if Path(path).parent == SHM_DIR and Path(path).name.startswith(PREFIX):
        return _open(shared, flags, os.O_NOFOLLOW, _check_arena)
    if _MEMFD.fullmatch(path):
        return _open(shared, flags, 0, _check_memory)
    raise _stale(shared, f"wanted {SHM_DIR}/{PREFIX}*, or memory without a name: this cannot be an arena")


def _map_memory(address: int | None, nbytes: int, rights: int, flags: int, fd: int) -> int:
    """Call mmap and return the address of the mapping. Raises OSError if it fails."""
    found = _libc.mmap(address, nbytes, rights, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _open(shared: Mapping[str, Any], flags: int, follow: int, *checks: Callable[[Mapping[str, Any], int], None]) -> int:
    """Return the descriptor of a file after `checks`, which get an O_PATH descriptor, so that a wrong file is never
    opened."""
    seen = os.open(str(shared["path"]), os.O_PATH | os.O_CLOEXEC | follow)
    try:
        for check in (_check_same, *checks):
            check(shared, seen)
        return os.open(f"/proc/self/fd/{seen}", flags | os.O_CLOEXEC)
    finally:
        os.close(seen)


def _check_same(shared: Mapping[str, Any], fd: int) -> None:
    """Check that the open file is the described file: the same device and inode, a regular file, the same size. Raises
    OSError if not."""
    found = os.fstat(fd)
    if any(shared.get(key) != value for key, value in identity(fd).items()):
        raise _stale(shared, "another file has this path here, as happens in another container")
    if not stat.S_ISREG(found.st_mode) or found.st_size != shared["nbytes"]:
        raise _stale(shared, f"wanted a regular file of {shared['nbytes']} bytes, this has {found.st_size}")


def _check_owner(shared: Mapping[str, Any], fd: int) -> None:
    """Check that the file belongs to the user of this process. Raises OSError if not."""
    if os.fstat(fd).st_uid != os.geteuid():
        raise _stale(shared, f"it belongs to user {os.fstat(fd).st_uid}, not to {os.geteuid()}")


def _check_arena(shared: Mapping[str, Any], fd: int) -> None:
    """Check that the file belongs to this user and that no other user may use it. Raises OSError if not."""
    _check_owner(shared, fd)
    if os.fstat(fd).st_mode & 0o077:
        raise _stale(shared, f"others may use it (mode {stat.S_IMODE(os.fstat(fd).st_mode):04o}); an arena is private")


def _check_memory(shared: Mapping[str, Any], fd: int) -> None:
    """Check that the file is unnamed memory (memfd) that a node of this user made. Raises OSError if not."""
    _check_owner(shared, fd)
    if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{PREFIX}"):
        raise _stale(shared, "it is not the memory of a node")


def _stale(shared: Mapping[str, Any], why: str) -> OSError:
    """Return the error for a file that is not what the node described."""
    return OSError(errno.ESTALE, why, str(shared["path"]))
