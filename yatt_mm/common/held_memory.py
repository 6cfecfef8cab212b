"""The memory that a unit's devices hold: that of its GPUs, or on the CPU that of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil

GPUS_VARIABLE = "YATT_MM_GPUS"
"""Numbers or UUIDs of the GPUs of an actor, with commas. The creator of the actor sets it, if the run has GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What a unit reports after a change of its state."""

    held_bytes: int
    """The memory afterwards, from the function `held_bytes`."""
    moved: Any = None
    """For a training rank, its `yatt_mm.protocol.training.MovedMemory`."""


def held_bytes() -> int:
    """Return the bytes in use on this process's GPUs, by all processes; without GPUs, resident in this process and its
    children.

    Roles that share a GPU take turns. So the bytes in use are those of the awake role, and those that sleeping roles
    cannot release.
    """
    gpus = os.environ.get(GPUS_VARIABLE)
    if gpus:
        return sum(_used_bytes(gpu) for gpu in gpus.split(","))
    process = psutil.Process()
    return sum(_resident_bytes(each) for each in (process, *process.children(recursive=True)))


def _used_bytes(gpu: str) -> int:
    """Return the bytes in use on a GPU, from NVML. CUDA would need a context, which takes half a gigabyte of the
    GPU."""
    import pynvml

    pynvml.nvmlInit()
    try:
        by_number = gpu.isdigit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
