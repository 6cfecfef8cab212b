"""The order of prompts: the data plane's sampler, without the samples that are set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.datasets.sampler import Sampler, Source
from yatt_mm.common.errors import DataError
from yatt_mm.protocol.control import TRAIN, Slot


class PromptOrder:
    """Deals out the samples of the training sets in an order that depends on the seed alone, mixed by their weights.

    The state is a few numbers per set and the samples that are set aside.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        """`sources`: the training sets by their names in the config, which the order depends on; what the sets' files
        or roots are called does not matter."""
        self.sources = tuple(sources)
        self.skipped: dict[str, set[int]] = {source.dataset: set() for source in sources}
        """[set] the samples that were left out: they cannot be used, or a filter leaves them out."""
        self._sampler = Sampler(sources, seed=seed, batch_size=1)
        self._num_dealt = 0

    def take(self, count: int) -> list[Slot]:
        """Return the next `count` prompts, across the end of an epoch if necessary.

        Raises:
            DataError: every sample of a training set is set aside.
        """
        for source in self.sources:
            if len(self.skipped[source.dataset]) >= source.num_samples:
                which = "training samples" if len(self.sources) == 1 else f"samples of the set {source.dataset}"
                raise DataError(f"all {source.num_samples} {which} were left out; check data.train and data.filter")
        slots: list[Slot] = []
        while len(slots) < count:
            for draw in self._sampler.next_batch():
                if draw.index in self.skipped[draw.dataset]:
                    self._sampler.leave_out(draw.dataset)
                    continue
                slots.append(Slot(position=self._num_dealt, epoch=draw.epoch, index=draw.index, set_name=draw.dataset))
                self._num_dealt += 1
        return slots

    def set_aside(self, slot: Slot) -> None:
        """Leave the sample of a dealt prompt out from now on. Its set gives another prompt in its place."""
        self.skipped[slot.set_name].add(slot.index)
        self._sampler.leave_out(slot.set_name)

    def peek(self, count: int) -> list[Slot]:
        """Return what `take` would return now, without taking it."""
        return PromptOrder.from_state(self.state()).take(count)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        skipped = {name: sorted(indices) for name, indices in self.skipped.items()}
        return {"sampler": self._sampler.state(), "num_dealt": self._num_dealt, "skipped": skipped}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], sources: Sequence[Source] | None = None) -> PromptOrder:
        """Return the order that goes on where `state` was taken. Raises BadRequestError if the present `sources`
        differ."""
        sampler = Sampler.from_state(state["sampler"], sources)
        order = cls(sampler.sources, seed=state["sampler"]["seed"])
        skipped = state["skipped"]
        if isinstance(skipped, list):  # of a version with one training set
            skipped = {TRAIN: skipped}
        order.skipped.update({name: set(indices) for name, indices in skipped.items()})
        order._sampler, order._num_dealt = sampler, state["num_dealt"]
        return order
