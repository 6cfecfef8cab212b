"""Processor cores as devices, on a machine without GPUs."""

from __future__ import annotations

import os
from pathlib import Path


def pin_to_core(core: int | None) -> None:
    """Keep this process's threads, and the processes that it starts from now on, on one core; None changes nothing."""
    if core is None:
        return
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def core_of(device: int) -> int:
    """The core that stands for a device: the cores that this process may use, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[device % len(cores)]
