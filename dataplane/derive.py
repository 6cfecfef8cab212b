"""Making objects: derived ones out of sources, sources out of their shards; each once, however many ask.

What another node calls its own is asked of that node first (`remote_objects.py`).

Single flight: callers that want the same object while it is being made wait for the one that makes it. What a kernel
made is remembered by checksum, so that making it again after eviction is counted apart and must give the same bytes.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dataplane.datasets import Datasets, Place
from dataplane.digests import content_digest, source_name
from dataplane.errors import (
    BadMediaError,
    ChecksumError,
    DataPlaneError,
    DatasetError,
    MissingObjectError,
    NodeTimeoutError,
    OutOfSpaceError,
    PeerError,
)
from dataplane.lineages import check_claim, derived_ref, file_job, source_job, source_ref
from dataplane.lru import Lru
from dataplane.peer_fetcher import PeerFetcher
from dataplane.peers import Peers
from dataplane.pool import Allocate, Pool
from dataplane.pool_process import Result
from dataplane.prefetch import WINDOW, Prefetched
from dataplane.quarantine import Quarantine, Wanted
from dataplane.recipes import parse_recipe
from dataplane.refs import BadMedia, Lineage, Ref
from dataplane.remote_objects import RemoteObjects
from dataplane.store import Store

MAX_REMEMBERED = 500_000
"""Results whose checksums are kept, least recently made or asked for first to go: about 1 kB each."""
SOURCE_TIMEOUT_S = 60.0
"""How long a pool thread waits for a source that another node has."""
FETCH_AGAIN_S = 1.0
"""In less time than this nothing comes of fetching again where somebody else's try failed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Made:
    """What is remembered of a derived object when it is evicted."""

    ref: Ref
    source_format: str


class Deriver:
    """Makes objects resident in a store. Thread-safe."""

    def __init__(
        self, store: Store, datasets: Datasets, pool: Pool, node_id: str, peers: Peers, fetcher: PeerFetcher
    ) -> None:
        self.num_processed = 0
        self.num_recomputed = 0
        self.processed_bytes = 0
        self.pixel_bytes = 0
        self._store = store
        self._datasets = datasets
        self._pool = pool
        self._node_id = node_id
        self._remote = RemoteObjects(store, datasets, peers, fetcher, lambda ref, until: self._start(ref, until)[0])
        self._prefetched = Prefetched(store)
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Ref]] = {}
        self._made: Lru[_Made] = Lru(MAX_REMEMBERED)
        self._quarantine = Quarantine()

    def derive(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> list[Ref | BadMedia]:
        """What `recipe` makes of each source, made now where it is not resident; BadMedia in the place of the rest.

        Waits for: the pool, and for room in the arena. Raises NodeTimeoutError at `deadline` (monotonic).
        """
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, ref.node) for ref in refs]
        made = self._make_all(wanted, deadline)
        return [self._as_asked(made[self._key(ref)], ref) for ref in wanted]

    def make_resident(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Fetch or make again what is not here. Raises what makes it impossible.

        `is_local`: another node asks, which knows itself whom else to ask; no request may go round in circles.
        """
        wanted = [self._remote.checked(ref, is_local=is_local) for ref in refs]
        for made in self._make_all(wanted, deadline).values():
            if isinstance(made, BadMedia):
                raise BadMediaError(f"{made.name} ({made.shard} {made.key}) is in quarantine: {made.reason}")

    def start(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Begin to make objects side by side, without waiting; `make_resident` collects what comes of it."""
        wanted = []
        for ref in refs:
            try:
                checked = self._remote.checked(ref, is_local=is_local)
            except DataPlaneError:
                continue  # `make_resident` says what is wrong with it
            if self._key(checked) not in self._quarantine:
                wanted.append(checked)
        self._start_all(wanted, deadline)

    def drop_stale(self, refs: Sequence[Ref]) -> None:
        """Let go of copies of other nodes' objects where a ref says that its home wrote another since."""
        self._remote.drop_stale(refs)

    def prefetch(self, refs: Sequence[Ref], recipe: Mapping[str, Any]) -> int:
        """Begin to make what `recipe` makes of each source, behind all that somebody waits for; waits for nothing.

        Returns how many refs, from the first on, are made, in the making, bad, or queued now: the rest does not fit the
        window. Objects that find no room beside those that were prefetched and not used yet are called off, and what
        another node calls its own is left to that node.
        """
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, ref.node) for ref in refs]
        return next((at for at, ref in enumerate(wanted) if not self._begin_ahead(ref)), len(wanted))

    def quarantine(self) -> list[BadMedia]:
        """Every medium that could not be made into what was asked."""
        return self._quarantine.all()

    def stat(self) -> dict[str, int]:
        """Counts of what was made."""
        with self._lock:
            return {
                "num_media": self._made.cost,
                "num_processed": self.num_processed,
                "num_recomputed": self.num_recomputed,
                "num_quarantined": len(self._quarantine),
                "processed_bytes": self.processed_bytes,
                "pixel_bytes": self.pixel_bytes,
                **self._remote.stat(),
                **self._prefetched.stat(),
            }

    def _key(self, ref: Ref) -> Wanted:
        """A medium may be good under one file name and mislabelled under another."""
        lineage = ref.lineage
        if lineage is None or lineage.recipe is None or not lineage.dataset:
            return ref.name, ()
        try:
            return ref.name, self._datasets.locate(lineage).formats
        except DatasetError:
            return ref.name, ()  # whoever makes it meets the error again

    def _make_all(self, refs: Sequence[Ref], deadline: float) -> dict[Wanted, Ref | BadMedia]:
        made: dict[Wanted, Ref | BadMedia] = {}
        missing: dict[Wanted, Ref] = {}
        for ref in refs:
            key = self._key(ref)
            if key in made or key in missing:
                continue
            entry = self._store.find(ref.name)
            bad = self._quarantine.get(key)
            if bad is not None:
                made[key] = bad
            elif entry is not None:
                self._prefetched.use(ref.name)
                made[key] = self._as_labelled(entry.ref, ref, key)
            else:
                missing[key] = ref
        started = self._start_all(list(missing.values()), deadline)
        waiting = {key: (ref, *begun) for (key, ref), begun in zip(missing.items(), started, strict=True)}
        for num_done, (key, (ref, future, is_own)) in enumerate(waiting.items()):
            try:
                made[key] = self._wait(ref, key, future, is_own, deadline)
            except _OverdueError as error:
                num_done += sum(other.done() for _, other, _ in list(waiting.values())[num_done:])
                raise NodeTimeoutError(
                    f"made {num_done} of {len(waiting)} objects before the deadline, waiting for {ref.name}; ask for "
                    "fewer at once, raise timeout_s, or start the node with more --workers"
                ) from error
        return made

    def _wait(self, ref: Ref, key: Wanted, future: "Future[Ref]", is_own: bool, deadline: float) -> Ref | BadMedia:
        """What becomes of an object. Where somebody else's try failed, on their deadline or their ref, try again."""
        while True:
            try:
                made = future.result(timeout=max(0.0, deadline - time.monotonic()))
                self._prefetched.use(made.name)
                return self._as_labelled(made, ref, key)
            except _Quarantined:
                key = self._key(ref)  # anew: the dataset may have been ingested again
                bad = self._quarantine.get(key)
                if bad is not None:
                    return bad
            except FutureTimeoutError as error:  # also what the task itself may have raised
                if not future.done():
                    raise _OverdueError from error
                if is_own or time.monotonic() >= deadline:
                    raise
            except DataPlaneError as error:
                needed_s = FETCH_AGAIN_S if isinstance(error, PeerError) else 0.0
                if is_own or time.monotonic() + needed_s >= deadline:
                    raise
            future, is_own = self._start_all([ref], deadline)[0]

    def _start_all(self, refs: Sequence[Ref], deadline: float) -> "list[tuple[Future[Ref], bool]]":
        """As `_start`, of many: what another node calls its own is asked of that node, in one go."""
        remote = [ref for ref in refs if self._remote.can_fetch(ref)]
        fetched = dict(zip(map(id, remote), self._remote.start(remote, deadline), strict=True))
        return [fetched[id(ref)] if id(ref) in fetched else self._start(ref, deadline) for ref in refs]

    def _start(self, ref: Ref, deadline: float) -> "tuple[Future[Ref], bool]":
        """The future of an object, and whether it was started for this caller: it is not if somebody else makes it."""
        with self._lock:
            future = self._in_flight.get(ref.name)
            if future is not None:
                self._pool.queue.promote(future)
                return future, False
            future = self._pool.submit(self._run, ref, partial(self._store.allocate, deadline=deadline))
            self._in_flight[ref.name] = future
            return future, True

    def _begin_ahead(self, ref: Ref) -> bool:
        """Queue an object that nobody waits for yet; False if the window is full."""
        is_there = self._key(ref) in self._quarantine or self._store.find(ref.name) is not None
        is_there = is_there or self._remote.can_fetch(ref)
        with self._lock:
            if is_there or ref.name in self._in_flight:
                return True
            if self._pool.queue.num_ahead >= WINDOW:
                return False
            self._in_flight[ref.name] = self._pool.queue.submit(partial(self._run_ahead, ref), is_urgent=False)
            return True

    def _run_ahead(self, ref: Ref) -> Ref:
        self._prefetched.begin(ref.name)
        made = None
        try:
            made = self._run(ref, self._prefetched.allocate)
            return made
        except OutOfSpaceError:
            with self._lock:
                called_off = self._pool.queue.call_off()
                self._in_flight = {name: future for name, future in self._in_flight.items() if future not in called_off}
            raise
        finally:
            self._prefetched.end(ref.name, made.nbytes if made else None)

    def _run(self, ref: Ref, allocate: Allocate) -> Ref:
        try:
            entry = self._store.find(ref.name)
            if self._key(ref) in self._quarantine:
                raise _Quarantined
            if entry is not None:
                return entry.ref
            return self._make_derived(ref, allocate) if ref.kind == "derived" else self._make_source(ref, allocate)
        finally:
            with self._lock:
                self._in_flight.pop(ref.name, None)

    def _as_labelled(self, made: Ref, wanted: Ref, key: Wanted) -> Ref | BadMedia:
        """The object, unless this caller's file name promises another format than its source has."""
        before, formats, lineage = self._made.get(made.name), key[1], wanted.lineage
        if before is None or not formats or before.source_format in formats or lineage is None:
            return made
        reason = f"mislabelled: named as {formats[0]}, holds {before.source_format}"
        return self._put_in_quarantine(wanted, lineage, key, self._datasets.locate(lineage).key, reason)

    def _as_asked(self, made: Ref | BadMedia, wanted: Ref) -> Ref | BadMedia:
        """The same object as this caller's sample names it: equal images share bytes, not shards."""
        lineage = wanted.lineage
        assert lineage is not None
        if isinstance(made, Ref):
            return replace(made, lineage=lineage)
        place = self._place(wanted, lineage)
        if place is None:
            return made
        return replace(made, dataset=lineage.dataset, shard=lineage.shard, key=place.key, offset=lineage.offset)

    # -- private: in a pool thread ---------------------------------------------------------------------------------

    def _make_derived(self, ref: Ref, allocate: Allocate) -> Ref:
        lineage = ref.lineage
        assert lineage is not None and lineage.recipe is not None
        place = self._place(ref, lineage)
        if place is not None and place.file.is_local:
            result = self._pool.run(file_job(lineage, place), allocate)
        else:
            result = self._run_on_resident_source(ref, place, allocate)
        key = place.key if place else source_name(lineage.source)
        if result.bad:
            formats = place.formats if place else ()
            self._put_in_quarantine(ref, lineage, (ref.name, formats), key, result.bad, is_lasting=result.is_lasting)
            raise _Quarantined
        if result.failed or result.slab is None:
            raise DatasetError(f"{lineage.dataset} {lineage.shard} {key}: {result.failed}")
        return self._publish(ref, result)

    def _place(self, ref: Ref, lineage: Lineage) -> Place | None:
        """Where the source lies in a shard; None if it belongs to no dataset, or to one that only its home has."""
        if not lineage.dataset:
            return None
        try:
            return self._datasets.locate(lineage)
        except DatasetError:
            if self._remote.can_fetch(ref):
                return None
            raise

    def _run_on_resident_source(self, ref: Ref, place: Place | None, allocate: Allocate) -> Result:
        """The source lies in the arena: put there by hand, or just fetched from a remote shard or its home."""
        lineage = ref.lineage
        assert lineage is not None
        name = source_name(lineage.source)
        leased = self._store.lease_one(name)
        if leased is None:
            source = source_ref(lineage, ref.node)
            if place is None and self._remote.can_fetch(source):
                self.make_resident([source], time.monotonic() + SOURCE_TIMEOUT_S)
            else:
                self._make_source(source, allocate)
            leased = self._store.lease_one(name)
        if leased is None:
            raise MissingObjectError(f"{name} was evicted again at once; start the node with more --memory")
        try:
            formats = place.formats if place else ()
            label = f"{lineage.shard} {place.key}" if place else name
            slab, file = leased.entry.slab, leased.entry.file
            if slab is not None:
                job = source_job(lineage, label, None, slab.offset, slab.nbytes, formats)
            else:
                assert file is not None
                job = source_job(lineage, label, str(file.path), file.offset, leased.entry.ref.nbytes, formats)
            return self._pool.run(job, allocate)
        finally:
            self._store.end_later(leased.lease)

    def _make_source(self, ref: Ref, allocate: Allocate) -> Ref:
        lineage = ref.lineage
        if lineage is None or not lineage.dataset:
            self._remote.check_home(ref)
            raise MissingObjectError(f"{ref.name} is not resident and belongs to no dataset; put it again")
        place = self._datasets.locate(lineage)
        data = place.file.read(place.offset, place.nbytes)
        if content_digest(data) != lineage.source:
            raise ChecksumError(
                f"{lineage.shard} {place.key}: the bytes are not those that were ingested; the shard changed: "
                "ingest it again"
            )
        slab = allocate(len(data))
        self._store.view(slab)[:] = np.frombuffer(data, np.uint8)
        made = replace(ref, node=self._node_id)
        return self._store.seal(slab, made, is_held=False, digest=lineage.source).ref

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
            self.num_processed += 1
            self.num_recomputed += before is not None
            self.processed_bytes += made.nbytes
            self.pixel_bytes += result.pixel_bytes
            self._made.put(ref.name, _Made(made, result.format))
        return self._store.seal(result.slab, made, is_held=False, digest=result.checksum).ref

    def _put_in_quarantine(
        self, ref: Ref, lineage: Lineage, wanted: Wanted, key: str, reason: str, *, is_lasting: bool = True
    ) -> BadMedia:
        log.warning("bad media: %s %s: %s", lineage.shard or "put by hand", key, reason)
        bad = BadMedia(
            dataset=lineage.dataset, shard=lineage.shard, key=key, reason=reason, name=ref.name, offset=lineage.offset
        )
        self._quarantine.put(wanted, bad, is_lasting=is_lasting)
        return bad


class _Quarantined(Exception):
    """The object is now in the quarantine table."""


class _OverdueError(Exception):
    """The caller's deadline passed while the object was being made."""
