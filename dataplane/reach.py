"""Opening what a node shares with its machine, and making sure that it is what the node meant.

A path means another file, or none, in another container: device and inode tell.
"""

import errno
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np


def identity(fd: int) -> dict[str, int]:
    """What tells a file from every other one of this machine."""
    stat = os.fstat(fd)
    return {"device": stat.st_dev, "inode": stat.st_ino}


def map_file(shared: Mapping[str, Any]) -> tuple[mmap.mmap, int]:
    """A file of a spilled object, mapped read-only, and the mapping's address. OSError as `open_segment`."""
    fd = open_segment(shared, os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, shared["nbytes"], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return mapping, np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]


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
