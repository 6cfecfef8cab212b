"""The weight of the divergence from the reference in the rewards, which may follow the divergence."""

from __future__ import annotations

from collections.abc import Mapping

from yatt_mm.algorithms.kl import adapted
from yatt_mm.algorithms.settings import KlSettings

METRIC = "train/kl"


class KlCoefficient:
    """Follows the metric `train/kl`. Every controller sees the same records, and so comes to the same value."""

    def __init__(self, settings: KlSettings, value: float | None = None) -> None:
        """`value`: that of the run from which this one goes on; None for a fresh run."""
        self._settings = settings
        self.value = settings.coef if value is None or not settings.target else value
        """The weight in the present step."""

    @property
    def state(self) -> float | None:
        """The weight for a checkpoint; None if it is always the same."""
        return self.value if self._settings.target else None

    def take(self, record: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of a step, after which the weight is that of the next step. Return what the step's record
        says of the weight; nothing if it is always the same."""
        if not self._settings.target or METRIC not in record:
            return {}
        used, self.value = self.value, adapted(self.value, record[METRIC], target=self._settings.target)
        return {"train/kl_coef": used}
