"""Makes one object, in a thread of the pool: a derived object from its source, or a source from its shard.

The checksum of each result is remembered. An object that is made again after eviction is counted separately, and must
have the same bytes. Which callers wait, and until when, is in `deriver.py`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataplane.core.digests import content_digest, source_name
from dataplane.core.errors import ChecksumError, DatasetError, MissingObjectError
from dataplane.core.integrity import check_claim
from dataplane.core.lineage import source_ref
from dataplane.core.lru_cache import LruCache
from dataplane.core.refs import BadMedia, Lineage, Ref
from dataplane.datasets.catalog import Catalog, MediumLocation
from dataplane.derive.decode_pool import Allocate, DecodePool
from dataplane.derive.fetch_or_make import RemoteObjects
from dataplane.derive.jobs import file_job, source_job
from dataplane.derive.quarantine import Key, Quarantine
from dataplane.derive.worker_handle import Result
from dataplane.media.recipes import FOR_PEOPLE
from dataplane.storage.entries import Written
from dataplane.storage.store import INTERNAL_SESSION, Store

MAX_REMEMBERED = 500_000
"""The number of results whose checksums are kept. One takes about 1 kB. The least recently used are dropped first."""
SOURCE_TIMEOUT_S = 60.0
"""The time in seconds that a pool thread waits for a source of another node."""

log = logging.getLogger(__name__)


class QuarantinedError(Exception):
    """The object is in the quarantine table now."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that a caller wants, with the place of its source in a data set of this node."""

    ref: Ref
    place: MediumLocation | None
    """None if no data set here has the source."""

    @property
    def key(self) -> Key:
        """The quarantine key: the object's name plus the formats that its file name promises. A medium may be good
        under one file name and mislabelled under another."""
        return self.ref.name, self.place.formats if self.place is not None and self.ref.kind == "derived" else ()


@dataclass(frozen=True, slots=True)
class _Made:
    """The record of a derived object that stays when the object is evicted."""

    ref: Ref
    source_format: str


class Materializer:
    """Makes objects resident in a store. Thread-safe.

    `fetch` makes sources of other nodes resident, until a deadline.
    """

    def __init__(
        self,
        store: Store,
        datasets: Catalog,
        pool: DecodePool,
        node_id: str,
        remote: RemoteObjects,
        fetch: Callable[[Sequence[Ref], float], None],
    ) -> None:
        self.quarantine = Quarantine()
        self._store = store
        self._datasets = datasets
        self._pool = pool
        self._node_id = node_id
        self._remote = remote
        self._fetch = fetch
        self._lock = threading.Lock()
        self._made: LruCache[_Made] = LruCache(MAX_REMEMBERED)
        self._num_processed = 0
        self._num_recomputed = 0
        self._num_thumbnails = 0
        self._processed_bytes = 0
        self._pixel_bytes = 0

    def wanted(self, ref: Ref) -> Wanted:
        """Return the object that a ref names, with the place of its source. If the place is unknown, making the object
        raises the reason."""
        lineage = ref.lineage
        if lineage is None or not lineage.dataset:
            return Wanted(ref, None)
        try:
            return Wanted(ref, self._datasets.locate(lineage))
        except DatasetError:
            return Wanted(ref, None)

    def make(self, wanted: Wanted, allocate: Allocate) -> Ref:
        """Return the object, made now unless it is resident. Raises QuarantinedError, or the reason why it cannot be
        made."""
        entry = self._store.find(wanted.ref.name)
        if wanted.key in self.quarantine:
            raise QuarantinedError
        if entry is not None:
            return entry.ref
        if wanted.ref.kind == "derived":
            return self._make_derived(wanted, allocate)
        return self._make_source(wanted.ref, wanted.place, allocate)

    def checked_label(self, made: Ref, wanted: Wanted) -> Ref | BadMedia:
        """Return the object, or BadMedia if the file name in `wanted` promises another format than the source has."""
        before, place = self._made.get(made.name), wanted.place
        if before is None or place is None or not place.formats or before.source_format in place.formats:
            return made
        reason = f"mislabelled: named as {place.formats[0]}, holds {before.source_format}"
        return self._put_in_quarantine(wanted, reason)

    def renamed(self, made: Ref | BadMedia, wanted: Wanted) -> Ref | BadMedia:
        """Return the object under the name of this caller's sample: equal images share their bytes, but each shard has
        its own name."""
        lineage, place = wanted.ref.lineage, wanted.place
        assert lineage is not None
        if isinstance(made, Ref):
            return replace(made, lineage=lineage)
        if place is None:
            return made
        return replace(made, dataset=lineage.dataset, shard=lineage.shard, key=place.key, offset=lineage.offset)

    def stat(self) -> dict[str, int]:
        """Return the counters of objects that were made."""
        with self._lock:
            return {
                "num_media": self._made.cost,
                "num_processed": self._num_processed,
                "num_recomputed": self._num_recomputed,
                "num_thumbnails": self._num_thumbnails,
                "num_quarantined": len(self.quarantine),
                "processed_bytes": self._processed_bytes,
                "pixel_bytes": self._pixel_bytes,
            }

    def _make_derived(self, wanted: Wanted, allocate: Allocate) -> Ref:
        ref, lineage = wanted.ref, wanted.ref.lineage
        assert lineage is not None and lineage.recipe is not None
        place = wanted.place or self._place(ref, lineage)
        data = self._datasets.take_encoded(lineage.source) if place is not None else None
        if place is not None and (data is not None or place.file.is_local):
            result = self._pool.run(file_job(lineage, place, data), allocate)
        else:
            result = self._run_on_resident_source(ref, place, allocate)
        if result.bad:
            self._put_in_quarantine(Wanted(ref, place), result.bad, is_lasting=result.is_lasting)
            raise QuarantinedError
        if result.failed or result.slab is None:
            key = place.key if place else source_name(lineage.source)
            raise DatasetError(f"{lineage.dataset} {lineage.shard} {key}: {result.failed}")
        return self._publish(ref, result)

    def _place(self, ref: Ref, lineage: Lineage) -> MediumLocation | None:
        """Return where the source is in a shard. None if no data set has it, or if only its home node has it."""
        if not lineage.dataset:
            return None
        try:
            return self._datasets.locate(lineage)
        except DatasetError:
            if self._remote.can_fetch(ref):
                return None
            raise

    def _run_on_resident_source(self, ref: Ref, place: MediumLocation | None, allocate: Allocate) -> Result:
        """Return the result of a job whose source is in the arena, because a client stored it or it was just
        fetched."""
        lineage = ref.lineage
        assert lineage is not None
        name = source_name(lineage.source)
        leased = self._store.lease_one(name)
        if leased is None:
            source = source_ref(lineage, ref.node)
            if place is None and self._remote.can_fetch(source):
                self._fetch([source], time.monotonic() + SOURCE_TIMEOUT_S)
            else:
                self._make_source(source, place, allocate)
            leased = self._store.lease_one(name)
        if leased is None:
            raise MissingObjectError(f"{name} was evicted again at once; start the node with more --memory")
        try:
            formats = place.formats if place else ()
            label = f"{lineage.shard} {place.key}" if place else name
            slab, file = leased.entry.slab, leased.entry.file
            if slab is not None:
                data = self._store.view(slab).data
                job = source_job(lineage, label, None, 0, slab.nbytes, formats, data)
            else:
                assert file is not None
                job = source_job(lineage, label, str(file.path), file.offset, leased.entry.ref.nbytes, formats)
            return self._pool.run(job, allocate)
        finally:
            self._store.end_leases([leased.lease], INTERNAL_SESSION)

    def _make_source(self, ref: Ref, place: MediumLocation | None, allocate: Allocate) -> Ref:
        lineage = ref.lineage
        if lineage is None or not lineage.dataset:
            self._remote.check_home(ref)
            raise MissingObjectError(f"{ref.name} is not resident and belongs to no dataset; put it again")
        place = place or self._datasets.locate(lineage)
        data = self._datasets.take_encoded(lineage.source) or place.file.read(place.offset, place.nbytes)
        if content_digest(data) != lineage.source:
            raise ChecksumError(
                f"{lineage.shard} {place.key}: the bytes are not those that were ingested; the shard changed: "
                "ingest it again"
            )
        slab = allocate(len(data))
        self._store.view(slab)[:] = np.frombuffer(data, np.uint8)
        made = replace(ref, node=self._node_id)
        return self._store.publish([Written(slab, made, lineage.source)])[0].ref

    def _publish(self, ref: Ref, result: Result) -> Ref:
        assert result.slab is not None and result.meta is not None
        meta = {**result.meta, "checksum": result.checksum}
        made = replace(ref, node=self._node_id, shape=result.shape, nbytes=result.slab.nbytes, meta=meta)
        before = self._made.get(ref.name)
        try:
            for claim in [ref, before.ref] if before else [ref]:
                check_claim(claim, made)
        except ChecksumError:
            self._store.abort(result.slab)
            raise
        with self._lock:
            if _is_for_people(ref):
                self._num_thumbnails += 1
            else:
                self._num_processed += 1
                self._num_recomputed += before is not None
                self._processed_bytes += made.nbytes
                self._pixel_bytes += result.pixel_bytes
                self._made.put(ref.name, _Made(made, result.format))
        return self._store.publish([Written(result.slab, made, result.checksum)])[0].ref

    def _put_in_quarantine(self, wanted: Wanted, reason: str, *, is_lasting: bool = True) -> BadMedia:
        ref, lineage = wanted.ref, wanted.ref.lineage
        assert lineage is not None
        key = wanted.place.key if wanted.place else source_name(lineage.source)
        log.warning("bad media: %s %s: %s", lineage.shard or "put by hand", key, reason)
        bad = BadMedia(
            dataset=lineage.dataset, shard=lineage.shard, key=key, reason=reason, name=ref.name, offset=lineage.offset
        )
        self.quarantine.put(wanted.key, bad, is_lasting=is_lasting)
        return bad


def _is_for_people(ref: Ref) -> bool:
    """Return True for a thumbnail, which is not one of the media that models see."""
    recipe = ref.lineage.recipe if ref.lineage else None
    return recipe is not None and recipe["kernel"] in FOR_PEOPLE
