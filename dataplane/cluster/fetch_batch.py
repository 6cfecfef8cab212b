"""Objects that are fetched from one node together: what waits for each, and where in the arena it goes."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from dataplane.client.download import Whole
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.lineage import check_claim
from dataplane.core.refs import Ref
from dataplane.storage.entries import Slab
from dataplane.storage.store import Store

ELSEWHERE_S = 5.0
"""How long to try for what can also be made here."""
_LANE_BYTES = 8 << 20
"""Of objects that come together: each connection more is worth opening from about this size on."""

Land = Callable[[Ref, Ref | DataPlaneError], None]
"""What came of an object that was asked for: it is resident, or why it cannot be had."""


class FetchBatch:
    """Objects that are fetched together, and what waits for them."""

    def __init__(self, refs: Sequence[Ref], land: Land, is_makeable: bool, deadline: float, lane: int) -> None:
        self.lane = lane
        self.home = refs[0].node
        self.is_makeable = is_makeable
        self.rest = dict(enumerate(refs))
        self._land = land
        self._deadline = deadline

    def until(self, now: float) -> float:
        """When to give up: early enough to say why, and to make it here if that is possible."""
        left = self._deadline - now
        return now + (min(ELSEWHERE_S, left / 2) if self.is_makeable else left - min(0.5, left / 10))

    def end(self, key: int, result: Ref | DataPlaneError) -> None:
        """An object is resident, or cannot be had."""
        ref = self.rest.pop(key, None)
        if ref is not None:
            self._land(ref, result)

    def fail_rest(self, error: Callable[[Ref], DataPlaneError]) -> None:
        """None of what is left can be had."""
        for key, ref in list(self.rest.items()):
            self.end(key, error(ref))


class ArenaSink:
    """Slabs of the arena; what came whole is sealed, and may be evicted: its home has it."""

    def __init__(self, store: Store, batch: FetchBatch, until: float, count: Callable[[int, int], None]) -> None:
        """`count` is told how many objects, and of how many bytes, came whole."""
        self._keys = list(batch.rest)
        self.refs = [batch.rest[key] for key in self._keys]
        self._store = store
        self._batch = batch
        self._until = until
        self._count = count
        self._slabs: dict[int, Slab] = {}

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """A slab for the object."""
        check_claim(self.refs[at], ref)
        slab = self._store.allocate(ref.nbytes, self._until if can_wait else 0.0)
        self._slabs[at] = slab
        return self._store.view(slab)

    def done(self, whole: Sequence[Whole]) -> None:
        """Publish them, then tell whoever waits for them."""
        slabs = [self._slabs[at] for at, _, _ in whole]
        entries = self._store.seal_all(slabs, [(ref, digest) for _, ref, digest in whole], is_held=False)
        for at, _, _ in whole:
            del self._slabs[at]
        self._count(len(whole), sum(ref.nbytes for _, ref, _ in whole))
        for (at, ref, _), entry in reversed([*zip(whole, entries, strict=True)]):  # who waits in order wakes once
            try:
                check_claim(ref, entry.ref)  # the name may have been taken here meanwhile
            except ChecksumError as error:
                self.failed(at, error)
            else:
                self._batch.end(self._keys[at], entry.ref)

    def give_up(self, at: int) -> None:
        """Give the slab back, unless it is published."""
        slab = self._slabs.pop(at, None)
        if slab is not None:
            self._store.abort(slab)

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Tell whoever waits for it."""
        self._batch.end(self._keys[at], error)


def parted(refs: Sequence[Ref], num_streams: int) -> list[list[Ref]]:
    """The objects in groups of about the same bytes, one for each connection: one carries one core's worth."""
    total = sum(ref.nbytes for ref in refs)
    lanes: list[list[Ref]] = [[] for _ in range(min(num_streams, os.cpu_count() or 1, total // _LANE_BYTES) or 1)]
    sizes = [0] * len(lanes)
    for ref in refs:
        lane = sizes.index(min(sizes))
        lanes[lane].append(ref)
        sizes[lane] += ref.nbytes
    return [lane for lane in lanes if lane]
