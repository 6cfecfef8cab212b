"""Opening what a node shares with its machine, and making sure that it is what the node meant.

A path means another file, or none, in another container: device and inode tell. And whoever answers at an address may
be no node at all: an arena is opened only where arenas of this user lie, a spilled object only if it is a file of ours.
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

SHM_DIR = Path("/dev/shm")
PREFIX = "dataplane-"
"""How the names of segments begin, in `SHM_DIR` and without a folder."""
FILE_SUFFIX = ".arrow"
"""How the names of spilled objects end."""
_MEMFD = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def identity(fd: int) -> dict[str, int]:
    """What tells a file from every other one of this machine."""
    found = os.fstat(fd)
    return {"device": found.st_dev, "inode": found.st_ino}


class FileMapping:
    """The first bytes of a file, mapped read-only until the last array over them is gone.

    It keeps no descriptor open, as `mmap.mmap` and `np.memmap` do: objects that are mapped by the thousand would use up
    those that a process may have. OSError where the system maps no more.
    """

    __slots__ = ("__array_interface__", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = 0
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address, self.nbytes = int(address), nbytes
        self.__array_interface__ = {"data": (self.address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self.nbytes:
            _libc.munmap(self.address, self.nbytes)


def map_file(shared: Mapping[str, Any], *, is_own: bool = False) -> FileMapping:
    """A file of a spilled object, mapped whole; `is_own` says that this process described it itself.

    OSError where it cannot be opened from here, is no such file of this user, or the system maps no more.
    """
    if not is_own and not str(shared["path"]).endswith(FILE_SUFFIX):
        raise _stale(shared, f"its name does not end in {FILE_SUFFIX}")
    fd = _open(shared, os.O_RDONLY, os.O_NOFOLLOW, *(() if is_own else (_check_owner,)))
    try:
        return FileMapping(fd, shared["nbytes"])
    finally:
        os.close(fd)


def open_segment(shared: Mapping[str, Any], flags: int) -> int:
    """A descriptor of a node's arena as the node describes it: path, nbytes, device, inode.

    OSError where it cannot be opened from here, is another file, or is nothing that a node of this user made.
    """
    path = str(shared["path"])
    if Path(path).parent == SHM_DIR and Path(path).name.startswith(PREFIX):
        return _open(shared, flags, os.O_NOFOLLOW, _check_arena)
    if _MEMFD.fullmatch(path):
        return _open(shared, flags, 0, _check_memory)
    raise _stale(shared, f"wanted {SHM_DIR}/{PREFIX}*, or memory without a name: no arena lies there")


def _open(shared: Mapping[str, Any], flags: int, follow: int, *checks: Callable[[Mapping[str, Any], int], None]) -> int:
    """Look before opening: what is not the file that was described is not touched at all."""
    seen = os.open(str(shared["path"]), os.O_PATH | os.O_CLOEXEC | follow)
    try:
        for check in (_check_same, *checks):
            check(shared, seen)
        return os.open(f"/proc/self/fd/{seen}", flags | os.O_CLOEXEC)
    finally:
        os.close(seen)


def _check_same(shared: Mapping[str, Any], fd: int) -> None:
    found = os.fstat(fd)
    if any(shared.get(key) != value for key, value in identity(fd).items()):
        raise _stale(shared, "another file has this path here, as in another container")
    if not stat.S_ISREG(found.st_mode) or found.st_size != shared["nbytes"]:
        raise _stale(shared, f"wanted a regular file of {shared['nbytes']} bytes, this has {found.st_size}")


def _check_owner(shared: Mapping[str, Any], fd: int) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise _stale(shared, f"it belongs to user {os.fstat(fd).st_uid}, not to {os.geteuid()}")


def _check_arena(shared: Mapping[str, Any], fd: int) -> None:
    _check_owner(shared, fd)
    if os.fstat(fd).st_mode & 0o077:
        raise _stale(shared, f"others may use it (mode {stat.S_IMODE(os.fstat(fd).st_mode):04o}); an arena is private")


def _check_memory(shared: Mapping[str, Any], fd: int) -> None:
    _check_owner(shared, fd)
    if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{PREFIX}"):
        raise _stale(shared, "it is no memory of a node")


def _stale(shared: Mapping[str, Any], why: str) -> OSError:
    return OSError(errno.ESTALE, why, str(shared["path"]))
