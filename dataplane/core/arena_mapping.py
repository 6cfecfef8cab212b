"""The arena of a node as a client maps it. Only the process that mapped it sees it, and only while its session lasts.

A forked child does not get the mapping: the node keeps objects in place for the process that has the session, and not
for its children. In their place the child finds memory that it cannot read, so a child that touches an inherited view
is ended by the system (SIGSEGV) and never sees other bytes.
"""

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

from dataplane.core.shared_files import FileMapping, cover_memory, open_segment

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_ARENAS: "weakref.WeakSet[FileMapping]" = weakref.WeakSet()
"""All mappings of arenas in this process."""

log = logging.getLogger(__name__)


def map_arena(shared: Mapping[str, Any], *, is_writable: bool = False) -> FileMapping:
    """Map the arena that a node describes, with all of its pages at once. Raises OSError like `open_segment`."""
    fd = open_segment(shared, os.O_RDWR if is_writable else os.O_RDONLY)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = FileMapping(fd, shared["nbytes"], flags, is_writable=is_writable)
    finally:
        os.close(fd)
    if _libc.madvise(mapping.address, mapping.nbytes, mmap.MADV_DONTFORK):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _ARENAS.add(mapping)
    return mapping


def revoke(mapping: FileMapping) -> None:
    """Make a mapping inaccessible: the system ends a process that still touches it (SIGSEGV)."""
    cover_memory(mapping.address, mapping.nbytes, replaces=True)


def _cover_in_child() -> None:
    """In a forked child, take the addresses of the arenas, so that nothing else is mapped where views look."""
    for mapping in list(_ARENAS):
        try:
            cover_memory(mapping.address, mapping.nbytes, replaces=False)
        except OSError as error:  # another hook was faster: then this object must not unmap what it mapped
            log.critical("views of %d bytes at %#x must not be touched in this child: %s", *_give_up(mapping), error)


def _give_up(mapping: FileMapping) -> tuple[int, int]:
    """Forget the memory of a mapping, and return its number of bytes and its address."""
    nbytes, mapping.nbytes = mapping.nbytes, 0
    return nbytes, mapping.address


os.register_at_fork(after_in_child=_cover_in_child)
