"""The order of prompts: one permutation per epoch, one cursor, and a set of samples to skip."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from yatt_mm.common.errors import ConfigError
from yatt_mm.protocol.control import Slot


@dataclass(slots=True, kw_only=True)
class PromptCursor:
    """Deals out the samples of a data set in an order that depends on the seed alone.

    The state is a few numbers (epoch, place, drawn) and the quarantined samples.
    """

    num_samples: int
    seed: int
    epoch: int = 0
    place: int = 0
    """The place in this epoch's permutation."""
    num_drawn: int = 0
    skipped: set[int] = field(default_factory=set)
    """The samples whose media could not be decoded."""
    _order: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[Slot]:
        """Return the next `count` prompts, across the end of an epoch if necessary.

        Raises:
            ConfigError: every sample of the data set is quarantined.
        """
        if len(self.skipped) >= self.num_samples:
            raise ConfigError(
                f"all {self.num_samples} training samples are quarantined (quarantine.jsonl says why); check data.train"
            )
        slots: list[Slot] = []
        while len(slots) < count:
            if self.place == self.num_samples:
                self.epoch, self.place, self._order = self.epoch + 1, 0, []
            if not self._order:
                self._order = epoch_order(self.num_samples, self.seed, self.epoch)
            index = self._order[self.place]
            self.place += 1
            if index not in self.skipped:
                slots.append(Slot(position=self.num_drawn, epoch=self.epoch, index=index))
                self.num_drawn += 1
        return slots

    def peek(self, count: int) -> list[Slot]:
        """Return what `take` would return now, without taking it."""
        return replace(self, skipped=set(self.skipped)).take(count)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (JSON)."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "epoch": self.epoch,
            "place": self.place,
            "num_drawn": self.num_drawn,
            "skipped": sorted(self.skipped),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PromptCursor:
        """Return the cursor that `state` describes."""
        return cls(**{**state, "skipped": set(state["skipped"])})


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the permutation of one epoch."""
    order = list(range(num_samples))
    random.Random(f"prompt order {seed} {epoch}").shuffle(order)
    return order
