"""The memory in which a worker leaves a result for the node, which copies it into the arena.

A worker maps this memory and nothing of the arena, so whatever its decoders do, they can change no object. The copy
costs about a millisecond for 10 MB. Mapping the slab itself would cost more than half of that, and the descriptor that
a worker needs for it opens the whole arena.
"""

import ctypes
import fcntl
import mmap
import os

import numpy as np
from blake3 import blake3

from dataplane.core.digests import digest_of
from dataplane.core.shared_files import FileMapping

KEPT_BYTES = 64 << 20
"""The memory in bytes that stays between two jobs. What a bigger result took goes back to the system."""
_PIECE_BYTES = 1 << 20
"""The bytes that are copied and hashed at a time: they are still in the processor's cache when they are hashed."""
_SIZE_IS_FINAL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)


class ResultMemory:
    """Memory without a name, which the node and one worker share. Only pages that are written take memory."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes` is the size of the largest result. Raises OSError if the system gives no such memory."""
        self.nbytes = nbytes
        self.fd = os.memfd_create("decode-result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """For the worker. The node closes it when the worker has it."""
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_IS_FINAL)  # a worker that cut it would end the node
            self._mapping = FileMapping(self.fd, nbytes, is_writable=True)
        except OSError:
            os.close(self.fd)
            raise
        self._bytes = np.asarray(self._mapping)

    def take(self, out: np.ndarray) -> str:
        """Copy the first bytes into a flat uint8 array until it is full, and return its checksum."""
        hashed = blake3()
        for at in range(0, len(out), _PIECE_BYTES):
            piece = out[at : at + _PIECE_BYTES]
            piece[:] = self._bytes[at : at + len(piece)]
            hashed.update(piece.data)  # what the arena has, whatever the worker still writes
        self._trim(len(out))
        return digest_of(hashed)

    def _trim(self, used_bytes: int) -> None:
        if used_bytes > KEPT_BYTES:
            rest = ctypes.c_void_p(self._mapping.address + KEPT_BYTES), ctypes.c_size_t(self.nbytes - KEPT_BYTES)
            _libc.madvise(*rest, mmap.MADV_REMOVE)


def map_result_memory(fd: int, nbytes: int) -> np.ndarray:
    """Return the memory as the worker maps it, and close its descriptor."""
    try:
        return np.asarray(FileMapping(fd, nbytes, is_writable=True))
    finally:
        os.close(fd)
