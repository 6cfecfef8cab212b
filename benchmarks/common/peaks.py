"""Measures the peak memory of a piece of work in this process: on its CUDA device, or the resident size on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(slots=True)
class Peak:
    """The result of `measured_peak`, filled in when its block ends."""

    num_bytes: int = 0
    """The peak in bytes, above what was in use when the block began."""


@contextmanager
def measured_peak() -> Iterator[Peak]:
    """Measure the peak memory of a `with` block, in bytes: of the CUDA device, or the resident size on the CPU."""
    if not torch.cuda.is_available():
        with measured_host_peak() as peak:
            yield peak
        return
    gc.collect()
    peak = Peak()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield peak
    torch.cuda.synchronize()
    peak.num_bytes = torch.cuda.max_memory_allocated() - before


@contextmanager
def measured_host_peak() -> Iterator[Peak]:
    """Measure by how much the resident size of this process grows in a `with` block at most. The system keeps the
    maximum (`VmHWM`), so nothing is sampled or missed."""
    gc.collect()
    peak = Peak()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    before = _status_bytes("VmRSS")
    yield peak
    peak.num_bytes = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
