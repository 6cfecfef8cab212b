"""How much memory a unit's devices hold: that of its GPUs, or on the CPU that of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil

GPUS_VARIABLE = "YATT_MM_GPUS"
"""Numbers or UUIDs of the GPUs of an actor, with commas; set where it is created, if the run has GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What a unit reports of a change of its state."""

    held_bytes: int
    """Afterwards, as of `held_bytes`."""
    moved: Any = None
    """Of a training rank: `yatt_mm.protocol.training.Moved`."""


def held_bytes() -> int:
    """In use on this process's GPUs, by everybody; without GPUs, resident in this process and in its children.

    Roles that share a GPU take turns, so what is in use is that of who is awake and of what sleepers could not give up.
    """
    gpus = os.environ.get(GPUS_VARIABLE)
    if gpus:
        return sum(_used_bytes(gpu) for gpu in gpus.split(","))
    process = psutil.Process()
    return sum(_resident_bytes(each) for each in (process, *process.children(recursive=True)))


def _used_bytes(gpu: str) -> int:
    """As NVML tells it: asking CUDA would take half a gigabyte of the GPU for a context."""
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
