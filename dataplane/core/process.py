"""Settings of the current process: die with the parent, limit memory, and keep or return memory that malloc freed."""

import ctypes
import resource
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask the system to send this process a signal when the parent's *thread* that started it ends.

    The parent itself may still run then: compare `os.getppid()` before acting on the signal. This works only on Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_descendants() -> None:
    """Become the parent of every descendant that loses its own. This works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` of address space above what it maps now. This works only on Linux.

    Beyond the limit Python raises MemoryError, and malloc in C returns NULL.
    """
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = num_pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def limit_private_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` of memory of its own above what it has now. Memory that is mapped as shared
    does not count. This works only on Linux; `limit_memory` says what happens beyond the limit."""
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = num_pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def keep_freed_memory(largest_bytes: int = 1 << 30, kept_bytes: int = (1 << 31) - 1) -> None:
    """Let malloc keep freed memory instead of returning it to the operating system. Only processes that move big
    objects call this.

    Blocks of up to `largest_bytes` are reused, and up to `kept_bytes` stay with the process. The reason is the cost of
    page faults: in fresh blocks of 64 MiB they limit the speed of Flight more than serialisation does, and in fresh
    images they take a quarter of the decoding time. All threads share one heap. With a heap per thread, every gRPC
    thread would cause page faults for its own buffers and no thread would give its buffers back.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, largest_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
    libc.mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give memory that malloc has freed back to the operating system, in about half a millisecond."""
    ctypes.CDLL(None).malloc_trim(0)


class Trimmer:
    """Gives freed memory back to the operating system (malloc_trim), `wait_s` seconds after a request. It is
    thread-safe.

    It trims at most about once in `wait_s`, for any number of requests.
    """

    def __init__(self, wait_s: float = 1.0) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._is_waiting = False
        self._asked_at = 0.0

    def request(self) -> None:
        """Ask that freed memory goes back to the system in `wait_s` seconds. Memory that is still in use now, such as a
        refused message, is free by then."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._is_waiting:
                return
            self._is_waiting = True
        self._trim_in(self._wait_s)

    def _trim_in(self, seconds: float) -> None:
        """Start a timer for `_trim`."""
        timer = threading.Timer(seconds, self._trim)
        timer.daemon = True
        timer.start()

    def _trim(self) -> None:
        """Give freed memory back now, and again later if another request came since the timer was started."""
        with self._lock:
            left_s = self._asked_at + self._wait_s - time.monotonic()
            self._is_waiting = left_s > 0
        return_freed_memory()
        if left_s > 0:  # another request came while this one was waiting
            self._trim_in(left_s)


TRIMMER = Trimmer()
"""The only instance, which all code of this process shares."""
