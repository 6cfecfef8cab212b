"""Small facts about processes: dying with a parent, and allocator settings that keep big transfers from faulting."""

import ctypes
import resource
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent's starting *thread* ends: compare getppid() before acting on it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def limit_memory(more_bytes: int) -> None:
    """Let this process map no more than `more_bytes` beyond what it maps now; then comes MemoryError, or NULL in C."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = num_pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def keep_freed_memory(largest_bytes: int = 1 << 30, kept_bytes: int = (1 << 31) - 1) -> None:
    """Let malloc reuse blocks of up to `largest_bytes`, and keep `kept_bytes`, instead of giving them to the kernel.

    Page faults of fresh 64 MiB blocks, not serialisation, limit Flight, and those of fresh images cost a quarter of the
    time of decoding them; for processes that move big objects only. One heap for all threads: with a heap for each,
    every thread of gRPC faults its own buffers in, and none gives them back.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, largest_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
    libc.mallopt(_M_ARENA_MAX, 1)


class Trimmer:
    """Gives freed memory back after all, a moment after it was asked to, and not often. Thread-safe."""

    def __init__(self, wait_s: float = 1.0) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._is_waiting = False
        self._asked_at = 0.0

    def soon(self) -> None:
        """What is in the way of it, such as a message that is being refused, is gone by then."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._is_waiting:
                return
            self._is_waiting = True
        self._trim_in(self._wait_s)

    def _trim_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._trim)
        timer.daemon = True
        timer.start()

    def _trim(self) -> None:
        with self._lock:
            left_s = self._asked_at + self._wait_s - time.monotonic()
            self._is_waiting = left_s > 0
        ctypes.CDLL(None).malloc_trim(0)
        if left_s > 0:  # asked again meanwhile
            self._trim_in(left_s)


TRIMMER = Trimmer()
"""Of this process."""
