"""Small facts about processes: dying with a parent, and allocator settings that keep big transfers from faulting."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def signal_on_parent_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent's starting *thread* ends: compare getppid() before acting on it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def keep_freed_memory() -> None:
    """Let malloc reuse big blocks instead of giving them back to the kernel after every Flight message.

    Page faults of fresh 64 MiB blocks, not serialisation, limit Flight; for processes that move big objects only.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
