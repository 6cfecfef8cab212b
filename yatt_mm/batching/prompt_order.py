"""The order of prompts: the data plane's sampler, without the samples that are set aside."""

from __future__ import annotations

from typing import Any

from dataplane.datasets.sampler import Sampler, Source
from yatt_mm.common.errors import DataError
from yatt_mm.protocol.control import Slot

TRAIN = "train"
"""The name under which the sampler knows the training set. It is the same whatever the set's files or root are called,
because the order depends on it."""


class PromptOrder:
    """Deals out the samples of the training set in an order that depends on the seed alone.

    The state is a few numbers and the samples that are set aside.
    """

    def __init__(self, *, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.skipped: set[int] = set()
        """The samples whose media could not be decoded."""
        self._sampler = Sampler([Source(dataset=TRAIN, num_samples=num_samples)], seed=seed, batch_size=1)
        self._num_dealt = 0

    def take(self, count: int) -> list[Slot]:
        """Return the next `count` prompts, across the end of an epoch if necessary.

        Raises:
            DataError: every sample of the training set is set aside.
        """
        if len(self.skipped) >= self.num_samples:
            raise DataError(f"all {self.num_samples} training samples are quarantined; check data.train")
        slots: list[Slot] = []
        while len(slots) < count:
            for draw in self._sampler.next_batch():
                if draw.index not in self.skipped:
                    slots.append(Slot(position=self._num_dealt, epoch=draw.epoch, index=draw.index))
                    self._num_dealt += 1
        return slots

    def peek(self, count: int) -> list[Slot]:
        """Return what `take` would return now, without taking it."""
        return PromptOrder.from_state(self.state()).take(count)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        return {"sampler": self._sampler.state(), "num_dealt": self._num_dealt, "skipped": sorted(self.skipped)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PromptOrder:
        """Return the order that goes on where `state` was taken."""
        sampler = Sampler.from_state(state["sampler"])
        (source,) = state["sampler"]["sources"]
        order = cls(num_samples=source["num_samples"], seed=state["sampler"]["seed"])
        order.skipped, order._sampler, order._num_dealt = set(state["skipped"]), sampler, state["num_dealt"]
        return order
