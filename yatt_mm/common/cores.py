"""Processor cores as devices, on a machine without GPUs."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def pin_to_cores(cores: Collection[int]) -> None:
    """Pin this process, and the processes that it starts from now on, to these cores. With none, nothing changes."""
    if not cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def core_of(device: int) -> int:
    """Return the processor core of a device: devices get the cores that this process may use, one after another."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[device % len(cores)]
