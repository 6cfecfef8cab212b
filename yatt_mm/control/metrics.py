"""Numbers of one step: sums, counts and maxima that add up over controllers. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Meter:
    """What one controller collects during a step; `merge` makes the step's record of all of them."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """Weight behind each mean; a name without a count is a plain sum."""
    maxima: dict[str, float] = field(default_factory=dict)

    def add_sum(self, name: str, value: float) -> None:
        """Sum over time and controllers."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_mean(self, name: str, total: float, count: float) -> None:
        """Mean over time and controllers: `total` over `count` things."""
        self.add_sum(name, total)
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_max(self, name: str, value: float) -> None:
        """Largest over time and controllers."""
        self.maxima[name] = max(self.maxima.get(name, value), value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block; over controllers the slowest counts."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.maxima[name] = self.maxima.get(name, 0.0) + time.perf_counter() - started


def merge(meters: Sequence[Meter]) -> dict[str, float]:
    """One record out of the meters of all controllers; means without a single count are left out."""
    total = Meter()
    for meter in meters:
        for name, value in meter.sums.items():
            total.add_sum(name, value)
        for name, count in meter.counts.items():
            total.counts[name] = total.counts.get(name, 0.0) + count
        for name, value in meter.maxima.items():
            total.add_max(name, value)
    record = dict(total.maxima)
    for name, value in total.sums.items():
        if name not in total.counts:
            record[name] = value
        elif total.counts[name]:
            record[name] = value / total.counts[name]
    return record


def resident_bytes() -> int:
    """Resident memory of this process, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
