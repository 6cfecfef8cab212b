"""Making objects: derived ones out of sources, sources out of their shards; each once, however many ask.

Single flight: callers that want the same object while it is being made wait for the one that makes it. What a kernel
made is remembered by checksum, so that making it again after eviction is counted apart and must give the same bytes.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

import numpy as np

from dataplane.datasets import Datasets, Place
from dataplane.digests import content_digest, source_name
from dataplane.errors import (
    BadMediaError,
    ChecksumError,
    DatasetError,
    MissingObjectError,
    NodeTimeoutError,
)
from dataplane.lineages import checked_ref, derived_ref, file_job, source_job, source_ref
from dataplane.pool import Pool, Result
from dataplane.recipes import parse_recipe
from dataplane.refs import BadMedia, Lineage, Ref
from dataplane.store import Store

log = logging.getLogger(__name__)


class Deriver:
    """Makes objects resident in a store. Thread-safe."""

    def __init__(self, store: Store, datasets: Datasets, pool: Pool, node_id: str) -> None:
        self.num_processed = 0
        self.num_recomputed = 0
        self.processed_bytes = 0
        self.pixel_bytes = 0
        self._store = store
        self._datasets = datasets
        self._pool = pool
        self._node_id = node_id
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Ref]] = {}
        self._made: dict[str, Ref] = {}
        self._quarantine: dict[str, BadMedia] = {}

    def derive(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> list[Ref | BadMedia]:
        """What `recipe` makes of each source, made now where it is not resident; BadMedia in the place of the rest.

        Waits for: the pool, and for room in the arena. Raises NodeTimeoutError at `deadline` (monotonic).
        """
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, self._node_id) for ref in refs]
        made = self._make_all(wanted, deadline)
        return [self._as_asked(made[ref.name], ref) for ref in wanted]

    def make_resident(self, refs: Sequence[Ref], deadline: float) -> None:
        """Make again what was evicted, or what only another node made. Raises what makes it impossible."""
        for made in self._make_all([checked_ref(ref) for ref in refs], deadline).values():
            if isinstance(made, BadMedia):
                raise BadMediaError(f"{made.name} ({made.shard} {made.key}) is in quarantine: {made.reason}")

    def start(self, refs: Sequence[Ref], deadline: float) -> None:
        """Begin to make objects side by side, without waiting; `make_resident` collects what comes of it."""
        for ref in refs:
            if ref.kind != "plain" and ref.name not in self._quarantine:
                self._start(checked_ref(ref), deadline)

    def quarantine(self) -> list[BadMedia]:
        """Every medium that could not be made into what was asked."""
        with self._lock:
            return list(self._quarantine.values())

    def stat(self) -> dict[str, int]:
        """Counts of what was made."""
        with self._lock:
            return {
                "num_media": len(self._made),
                "num_processed": self.num_processed,
                "num_recomputed": self.num_recomputed,
                "num_quarantined": len(self._quarantine),
                "processed_bytes": self.processed_bytes,
                "pixel_bytes": self.pixel_bytes,
            }

    def _make_all(self, refs: Sequence[Ref], deadline: float) -> dict[str, Ref | BadMedia]:
        made: dict[str, Ref | BadMedia] = {}
        waiting: dict[str, Future[Ref]] = {}
        for ref in refs:
            if ref.name in made or ref.name in waiting:
                continue
            entry = self._store.find(ref.name)
            bad = self._quarantine.get(ref.name)
            if entry is not None:
                made[ref.name] = entry.ref
            elif bad is not None:
                made[ref.name] = bad
            else:
                waiting[ref.name] = self._start(ref, deadline)
        for name, future in waiting.items():
            try:
                made[name] = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError as error:
                num_done = sum(other.done() for other in waiting.values())
                raise NodeTimeoutError(
                    f"made {num_done} of {len(waiting)} objects before the deadline, waiting for {name}; ask for fewer "
                    "at once, raise timeout_s, or start the node with more --workers"
                ) from error
            except _Quarantined:
                made[name] = self._quarantine[name]
        return made

    def _start(self, ref: Ref, deadline: float) -> "Future[Ref]":
        """The future of an object; starts making it unless somebody else does."""
        with self._lock:
            future = self._in_flight.get(ref.name)
            if future is not None:
                return future
            make: Callable[[Ref, float], Ref] = self._make_derived if ref.kind == "derived" else self._make_source
            future = self._pool.submit(self._run, make, ref, deadline)
            self._in_flight[ref.name] = future
            return future

    def _run(self, make: Callable[[Ref, float], Ref], ref: Ref, deadline: float) -> Ref:
        try:
            entry = self._store.find(ref.name)
            return entry.ref if entry is not None else make(ref, deadline)
        finally:
            with self._lock:
                self._in_flight.pop(ref.name, None)

    def _as_asked(self, made: Ref | BadMedia, wanted: Ref) -> Ref | BadMedia:
        """The same object as this caller's sample names it: equal images share bytes, not shards."""
        lineage = wanted.lineage
        assert lineage is not None
        if isinstance(made, Ref):
            return replace(made, lineage=lineage)
        if not lineage.dataset:
            return made
        key = self._datasets.locate(lineage).key
        return replace(made, dataset=lineage.dataset, shard=lineage.shard, key=key, offset=lineage.offset)

    # -- private: in a pool thread ---------------------------------------------------------------------------------

    def _make_derived(self, ref: Ref, deadline: float) -> Ref:
        lineage = ref.lineage
        assert lineage is not None and lineage.recipe is not None
        place = self._datasets.locate(lineage) if lineage.dataset else None
        if place is not None and place.file.is_local:
            result = self._pool.run(file_job(lineage, place), deadline)
        else:
            result = self._run_on_resident_source(lineage, place, deadline)
        key = place.key if place else source_name(lineage.source)
        if result.bad:
            self._put_in_quarantine(ref, lineage, key, result.bad)
        if result.failed or result.slab is None:
            raise DatasetError(f"{lineage.dataset} {lineage.shard} {key}: {result.failed}")
        return self._publish(ref, result)

    def _run_on_resident_source(self, lineage: Lineage, place: Place | None, deadline: float) -> Result:
        """The source lies in the arena: put there by hand, or just fetched from a remote shard."""
        name = source_name(lineage.source)
        leased = self._store.lease_one(name)
        if leased is None and place is not None:
            self._make_source(source_ref(lineage, self._node_id), deadline)
            leased = self._store.lease_one(name)
        if leased is None:
            raise MissingObjectError(f"{name} is not resident and belongs to no dataset; put it again")
        try:
            formats = place.formats if place else ()
            label = f"{lineage.shard} {place.key}" if place else name
            slab = leased.entry.slab
            return self._pool.run(source_job(lineage, label, None, slab.offset, slab.nbytes, formats), deadline)
        finally:
            self._store.end_later(leased.lease)

    def _make_source(self, ref: Ref, deadline: float) -> Ref:
        lineage = ref.lineage
        if lineage is None or not lineage.dataset:
            raise MissingObjectError(f"{ref.name} is not resident and belongs to no dataset; put it again")
        place = self._datasets.locate(lineage)
        data = place.file.read(place.offset, place.nbytes)
        if content_digest(data) != lineage.source:
            raise ChecksumError(
                f"{lineage.shard} {place.key}: the bytes are not those that were ingested; the shard changed: "
                "ingest it again"
            )
        slab = self._store.allocate(len(data), deadline)
        self._store.view(slab)[:] = np.frombuffer(data, np.uint8)
        return self._store.seal(slab, ref, is_held=False).ref

    def _publish(self, ref: Ref, result: Result) -> Ref:
        assert result.slab is not None and result.meta is not None
        before = self._made.get(ref.name)
        known = before.meta.get("checksum") if before else ref.meta.get("checksum")
        if known is not None and known != result.checksum:
            self._store.abort(result.slab)
            raise ChecksumError(
                f"{ref.name} was made again with checksum {result.checksum}, before it was {known}; "
                "its kernel or Pillow changed: start with fresh refs"
            )
        made = replace(
            ref,
            shape=result.shape,
            nbytes=result.slab.nbytes,
            meta={**result.meta, "checksum": result.checksum},
            node=self._node_id,
        )
        with self._lock:
            self.num_processed += 1
            self.num_recomputed += before is not None
            self.processed_bytes += made.nbytes
            self.pixel_bytes += result.pixel_bytes
            self._made[ref.name] = made
        return self._store.seal(result.slab, made, is_held=False).ref

    def _put_in_quarantine(self, ref: Ref, lineage: Lineage, key: str, reason: str) -> None:
        log.warning("bad media: %s %s: %s", lineage.shard or "put by hand", key, reason)
        bad = BadMedia(
            dataset=lineage.dataset, shard=lineage.shard, key=key, reason=reason, name=ref.name, offset=lineage.offset
        )
        with self._lock:
            self._quarantine[ref.name] = bad
        raise _Quarantined(reason)


class _Quarantined(Exception):
    """The object is now in the quarantine table."""
