"""The bytes of a DoPut whose size is not known until it ends. They wait outside of the arena.

All such puts of a node share a budget. A put that stops is discarded at its deadline, also while its client stays.
"""

import mmap
import threading

import numpy as np

from dataplane.core.errors import BadRequestError, NodeTimeoutError, OverloadedError
from dataplane.core.process import TRIMMER
from dataplane.server.call_limits import ByteBudget

_FIRST_BYTES = 1 << 20


class UnannouncedPut:
    """The bytes of one put. Thread-safe.

    They are in a mapping of their own. It goes back to the system at once, and only its written pages take memory.
    """

    def __init__(self, budget: ByteBudget, capacity: int) -> None:
        """`capacity`: the bytes that fit into the node's arena."""
        self._nbytes = 0
        self._budget = budget
        self._capacity = capacity
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, _FIRST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._is_open = True

    def add(self, chunk: np.ndarray) -> None:
        """Append bytes. BadRequestError if they can never fit the node, OverloadedError if all such puts together are
        too big now, NodeTimeoutError after `expire`."""
        with self._lock:
            self._check_open()
            nbytes = self._nbytes + len(chunk)
            if nbytes > self._capacity:
                raise BadRequestError(f"DoPut of more than {self._capacity} bytes, which is all that this node has")
            try:
                self._budget.take(len(chunk))
            except OverloadedError as error:
                raise OverloadedError(
                    f"this node has no memory for more bytes of puts of unknown size, {self._capacity} bytes are its "
                    "limit: give nbytes, or dtype and shape, in the descriptor of DoPut, or try again later"
                ) from error
            self._nbytes = nbytes
            if nbytes > len(self._memory):
                self._memory.resize(max(nbytes, 2 * len(self._memory)))
            self._memory.write(chunk.data)

    def finished(self) -> int:
        """Return the number of bytes, after the last of them has come. NodeTimeoutError after `expire`."""
        with self._lock:
            self._check_open()
            return self._nbytes

    def copy_to(self, target: np.ndarray) -> None:
        """Copy all bytes into memory of their size. NodeTimeoutError after `expire`."""
        with self._lock:
            self._check_open()
            target[:] = np.frombuffer(self._memory, np.uint8)[: self._nbytes]

    def discard(self) -> None:
        """Free the memory. A second call does nothing."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._memory.close()
                self._budget.give_back(self._nbytes)

    def expire(self) -> None:
        """Free the memory at the deadline of the put."""
        self.discard()
        TRIMMER.request()  # its messages have arrived

    def _check_open(self) -> None:
        if not self._is_open:
            raise NodeTimeoutError(
                f"DoPut had brought {self._nbytes} bytes, and no end, at its deadline; put them again, with a longer "
                "timeout_s"
            )
