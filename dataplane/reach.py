"""Opening what a node shares with its machine, and making sure that it is what the node meant.

A path means another file, or none, in another container: device and inode tell.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Mapping
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def identity(fd: int) -> dict[str, int]:
    """What tells a file from every other one of this machine."""
    stat = os.fstat(fd)
    return {"device": stat.st_dev, "inode": stat.st_ino}


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


def map_file(shared: Mapping[str, Any]) -> FileMapping:
    """A file of a spilled object, mapped whole. OSError as `open_segment`, or where the system maps no more."""
    fd = open_segment(shared, os.O_RDONLY)
    try:
        return FileMapping(fd, shared["nbytes"])
    finally:
        os.close(fd)


def open_segment(shared: Mapping[str, Any], flags: int) -> int:
    """A descriptor of a segment or spilled file as a node describes it: path, nbytes, device, inode.

    OSError where it cannot be opened from here, or is another file, or shorter than it should be.
    """
    path = str(shared["path"])
    follow = 0 if path.startswith("/proc/") else os.O_NOFOLLOW
    fd = os.open(path, flags | follow | os.O_CLOEXEC)
    found = identity(fd)
    if any(shared.get(key, value) != value for key, value in found.items()) or os.fstat(fd).st_size < shared["nbytes"]:
        os.close(fd)
        raise OSError(errno.ESTALE, "another file has this path here, as in another container", path)
    return fd
