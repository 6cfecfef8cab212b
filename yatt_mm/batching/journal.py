"""The journal: what every controller gave its training ranks, in each step since the last committed checkpoint.

A step that a fault broke off goes on from it, so no prompt is answered twice. Ranks that are new are trained on it
again, from the checkpoint to the present step. It has refs and numbers; the records themselves are at the data plane,
so their bytes are limited.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.core.refs import Ref
from yatt_mm.batching.packed import Packed
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.step_meter import StepMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """What one controller brings to the update of one step."""

    groups: tuple[ScoredGroup, ...]
    """The groups that are trained on."""
    has_wrong_rewards: bool
    """True if a reward of any controller is out of `reward.range`, so the step is not trained on."""
    meter: StepMeter
    """The metrics of the step until then."""

    @property
    def nbytes(self) -> int:
        """The bytes of the groups' records at the data plane."""
        return sum(group.group.ref.nbytes for group in self.groups)


class Journal:
    """The shares of all controllers, by step."""

    def __init__(self, *, num_controllers: int, max_bytes: int) -> None:
        """`max_bytes`: the most bytes of records that stay for it at the data plane."""
        self._num_controllers = num_controllers
        self._max_bytes = max_bytes
        self._shares: dict[int, dict[int, tuple[Packed[StepShare], int]]] = {}
        """[step][controller] each with the bytes of its records, in the order of the steps."""

    def put(self, step: int, controller: int, share: Packed[StepShare], nbytes: int) -> int:
        """Note a controller's share of a step, and the bytes of its records. Return the first step whose records must
        stay: steps before it are dropped if all together are too large, and then a lost rank cannot be made again
        before the next checkpoint."""
        self._shares.setdefault(step, {})[controller] = share, nbytes
        if self._nbytes() > self._max_bytes:
            self.drop_until(step - 1)
        return min(self._shares)

    def drop_until(self, step: int) -> None:
        """Drop this step and all before it."""
        self._shares = {other: shares for other, shares in self._shares.items() if other > step}

    def drop_incomplete(self) -> None:
        """Drop steps to which a controller has not brought its share."""
        self._shares = {step: shares for step, shares in self._shares.items() if self._is_complete(step)}

    def share(self, step: int, controller: int) -> Packed[StepShare] | None:
        """Return a controller's share of a step to which all have brought theirs; None for other steps."""
        return self._shares[step][controller][0] if self._is_complete(step) else None

    def covers(self, first: int, last: int) -> bool:
        """Return True if every step from `first` to `last` is complete."""
        return all(self._is_complete(step) for step in range(first, last + 1))

    def refs(self, controller: int) -> dict[int, list[Ref]]:
        """Return [step] the records of a controller's shares."""
        return {
            step: [group.group.ref for group in shares[controller][0].open().groups]
            for step, shares in self._shares.items()
            if controller in shares
        }

    def _is_complete(self, step: int) -> bool:
        return len(self._shares.get(step, ())) == self._num_controllers

    def _nbytes(self) -> int:
        return sum(nbytes for shares in self._shares.values() for _, nbytes in shares.values())
