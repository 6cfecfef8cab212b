"""A batch of objects that are fetched together from one node: which callers wait for each object, and where in the
arena each is written."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from dataplane.client.arrivals import Whole
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.integrity import check_claim
from dataplane.core.refs import Ref
from dataplane.storage.entries import Slab, Written
from dataplane.storage.store import Store

ELSEWHERE_S = 5.0
"""The time limit, in seconds, for fetching an object that this node can also make itself."""
_LANE_BYTES = 8 << 20
"""The number of bytes per connection from which an additional connection is worth opening."""

Land = Callable[[Ref, Ref | DataPlaneError], None]
"""A callback that gets a requested object's original ref and its result: the resident ref, or the error."""


class FetchBatch:
    """Objects that are fetched together, with the callers that wait for them."""

    def __init__(self, refs: Sequence[Ref], land: Land, is_makeable: bool, deadline: float, lane: int) -> None:
        self.lane = lane
        self.home = refs[0].node
        self.is_makeable = is_makeable
        self.rest = dict(enumerate(refs))
        self._land = land
        self._deadline = deadline

    def until(self, now: float) -> float:
        """Return the time (monotonic) when fetching must give up: early enough to report the reason, and to make the
        object here if that is possible."""
        left = self._deadline - now
        return now + (min(ELSEWHERE_S, left / 2) if self.is_makeable else left - min(0.5, left / 10))

    def end(self, key: int, result: Ref | DataPlaneError) -> None:
        """Report the result of one object: it is resident, or the error."""
        ref = self.rest.pop(key, None)
        if ref is not None:
            self._land(ref, result)

    def fail_rest(self, error: Callable[[Ref], DataPlaneError]) -> None:
        """Report an error for every object that has no result yet."""
        for key, ref in list(self.rest.items()):
            self.end(key, error(ref))


class ArenaSink:
    """Receives objects into slabs of the arena. Whole objects are sealed and may be evicted, because their home node
    has them."""

    def __init__(self, store: Store, batch: FetchBatch, until: float, count: Callable[[Sequence[Ref]], None]) -> None:
        """`count` is called with the objects that were received completely."""
        self._keys = list(batch.rest)
        self.refs = [batch.rest[key] for key in self._keys]
        self._store = store
        self._batch = batch
        self._until = until
        self._count = count
        self._slabs: dict[int, Slab] = {}

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """Return a slab for the object."""
        check_claim(self.refs[at], ref)
        slab = self._store.allocate(ref.nbytes, self._until if can_wait else 0.0)
        self._slabs[at] = slab
        return self._store.view(slab)

    def done(self, whole: Sequence[Whole]) -> None:
        """Publish complete objects, then report each to its callers."""
        entries = self._store.publish([Written(self._slabs[at], ref, digest) for at, ref, digest in whole])
        for at, _, _ in whole:
            del self._slabs[at]
        self._count([ref for _, ref, _ in whole])
        # in this order the caller, which waits for them one by one, wakes once
        for (at, ref, _), entry in reversed([*zip(whole, entries, strict=True)]):
            try:
                check_claim(ref, entry.ref)  # meanwhile the name may have been used here
            except ChecksumError as error:
                self.failed(at, error)
            else:
                self._batch.end(self._keys[at], entry.ref)

    def discard(self, at: int) -> None:
        """Give the slab back, unless it is published."""
        slab = self._slabs.pop(at, None)
        if slab is not None:
            self._store.abort(slab)

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Report the error to the callers that wait for the object."""
        self._batch.end(self._keys[at], error)


def split_by_bytes(refs: Sequence[Ref], num_streams: int) -> list[list[Ref]]:
    """Return the objects in groups of about equal bytes, one group per connection, because one connection uses one
    core."""
    total = sum(ref.nbytes for ref in refs)
    lanes: list[list[Ref]] = [[] for _ in range(min(num_streams, os.cpu_count() or 1, total // _LANE_BYTES) or 1)]
    sizes = [0] * len(lanes)
    for ref in refs:
        lane = sizes.index(min(sizes))
        lanes[lane].append(ref)
        sizes[lane] += ref.nbytes
    return [lane for lane in lanes if lane]
