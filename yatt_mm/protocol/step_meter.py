"""The metrics of one step: sums, counts and maxima that are added up over controllers. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepMeter:
    """The metrics that one controller collects during a step. `merge` makes the step's record from all of them."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """The weight behind each mean. A name without a count is a plain sum."""
    maxima: dict[str, float] = field(default_factory=dict)

    def add_sum(self, name: str, value: float) -> None:
        """Add to a sum over the step and all controllers."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def add_mean(self, name: str, total: float, count: float) -> None:
        """Add to a mean over the step and all controllers: `total` is the sum of `count` values."""
        self.add_sum(name, total)
        self.counts[name] = self.counts.get(name, 0.0) + count

    def add_given(self, name: str, values: Sequence[float | None]) -> None:
        """Add to a mean over the step and all controllers the values that are not None."""
        given = [value for value in values if value is not None]
        self.add_mean(name, sum(given), len(given))

    def add_max(self, name: str, value: float) -> None:
        """Keep the largest value over time and controllers."""
        self.maxima[name] = max(self.maxima.get(name, value), value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block. Over controllers the slowest one counts."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - started)

    def add_time(self, name: str, seconds: float) -> None:
        """Add seconds to the time `name`. The metric is the largest sum of any controller."""
        self.maxima[name] = self.maxima.get(name, 0.0) + seconds

    def copy(self) -> StepMeter:
        """Return what was collected so far, which stays here too."""
        return StepMeter(sums=dict(self.sums), counts=dict(self.counts), maxima=dict(self.maxima))

    def begin_with(self, other: StepMeter) -> None:
        """Forget what was collected, and go on from a copy of another meter."""
        mine = other.copy()
        self.sums, self.counts, self.maxima = mine.sums, mine.counts, mine.maxima

    def add(self, other: StepMeter) -> None:
        """Add what another controller has collected."""
        for name, value in other.sums.items():
            self.add_sum(name, value)
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count
        for name, value in other.maxima.items():
            self.add_max(name, value)

    def take(self) -> StepMeter:
        """Return what was collected since the last call, and begin anew."""
        taken = StepMeter(sums=self.sums, counts=self.counts, maxima=self.maxima)
        self.sums, self.counts, self.maxima = {}, {}, {}
        return taken


def merge(meters: Sequence[StepMeter]) -> dict[str, float]:
    """Return one record from the meters of all controllers. Means without a single count are left out."""
    total = StepMeter()
    for meter in meters:
        total.add(meter)
    record = dict(total.maxima)
    for name, value in total.sums.items():
        if name not in total.counts:
            record[name] = value
        elif total.counts[name]:
            record[name] = value / total.counts[name]
    return record
