"""Which model of a run is the best so far, by a metric of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from yatt_mm.protocol.control import Best


class BestModel:
    """Follows the metric `eval.keep_best`. Every controller sees the same evaluations, and so comes to the same
    result."""

    def __init__(self, metric: str | None, best: Best | None = None) -> None:
        """`best`: that of the run from which this one goes on; None for a fresh run."""
        self._metric = metric
        self.best = best
        """The best evaluation so far; None before the first one, and if none is looked for."""

    @property
    def step(self) -> int | None:
        """The step of the best model so far that is kept; None if the model of the start is still the best."""
        return self.best.step if self.best is not None and self.best.step else None

    def take(self, step: int, record: Mapping[str, float]) -> bool:
        """Take the metrics of a step, and return True if its model is better than all before. The model of the start
        is only what others are compared with."""
        value = None if self._metric is None else record.get(self._metric)
        if value is None or (self.best is not None and value <= self.best.value):
            return False
        self.best = Best(step=step, value=value)
        return step > 0

    def metrics(self) -> dict[str, float]:
        """Return what a step's record says of the best model; nothing if none is looked for."""
        return {} if self.best is None else {"best/step": self.best.step, "best/value": self.best.value}

    def state(self) -> dict[str, Any] | None:
        """Return the best evaluation for a checkpoint (JSON)."""
        return None if self.best is None else asdict(self.best)
