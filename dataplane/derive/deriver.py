"""Makes objects resident: derived objects from sources, and sources from their shards. It also makes them again after
eviction, or after their node died. Each object is made once, for any number of callers.

Objects of other nodes are asked of those nodes first (`fetch_or_make.py`).

Single flight: callers that want the same object while it is being made wait for the one task that makes it. How one
object is made is in `materializer.py`.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.errors import (
    BadMediaError,
    DataPlaneError,
    NodeTimeoutError,
    OutOfSpaceError,
    PeerError,
)
from dataplane.core.refs import BadMedia, Ref
from dataplane.datasets.catalog import Catalog
from dataplane.derive.decode_pool import Allocate, DecodePool
from dataplane.derive.derived_refs import derived_ref
from dataplane.derive.fetch_or_make import RemoteObjects
from dataplane.derive.materializer import Materializer, QuarantinedError
from dataplane.derive.prefetch import WINDOW, PrefetchedObjects
from dataplane.derive.quarantine import Wanted
from dataplane.media.recipes import parse_recipe
from dataplane.storage.store import Store

FETCH_AGAIN_S = 1.0
"""A failed fetch is not retried for another caller who has less than this time left, in seconds."""


class Deriver:
    """Makes objects resident in a store. Thread-safe."""

    def __init__(
        self,
        store: Store,
        datasets: Catalog,
        pool: DecodePool,
        node_id: str,
        peers: PeerDirectory,
        fetcher: PeerFetcher,
    ) -> None:
        self._store = store
        self._pool = pool
        self._remote = RemoteObjects(store, datasets, peers, fetcher, lambda ref, until: self._start(ref, until)[0])
        self._maker = Materializer(store, datasets, pool, node_id, self._remote, self.make_resident)
        self._prefetched = PrefetchedObjects(store)
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Ref]] = {}

    def derive(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> list[Ref | BadMedia]:
        """Return the derived object that `recipe` makes of each source; what is not resident is made now. A medium that
        cannot be decoded gives BadMedia.

        Waits for: the pool, and for room in the arena. Raises NodeTimeoutError at `deadline` (monotonic).
        """
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, ref.node) for ref in refs]
        made = self._make_all(wanted, deadline)
        return [self._maker.renamed(made[self._maker.key(ref)], ref) for ref in wanted]

    def begin(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> None:
        """Begin to make the derived object of each source, without waiting. `derive` then waits for the results."""
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, ref.node) for ref in refs]
        quarantine = self._maker.quarantine
        missing = [
            ref for ref in wanted if self._store.find(ref.name) is None and self._maker.key(ref) not in quarantine
        ]
        self._start_all(missing, deadline)

    def make_resident(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Make every object resident that is not: fetch it, or make it again. If that is impossible, raise the reason.

        If `is_local`, the request comes from another node. That node asks further nodes itself, so no request can
        travel in a circle.
        """
        wanted = [self._remote.checked(ref, is_local=is_local) for ref in refs]
        for made in self._make_all(wanted, deadline).values():
            if isinstance(made, BadMedia):
                raise BadMediaError(f"{made.name} ({made.shard} {made.key}) is in quarantine: {made.reason}")

    def start(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Begin to make objects in parallel, without waiting. `make_resident` then waits for the results."""
        wanted = []
        for ref in refs:
            try:
                checked = self._remote.checked(ref, is_local=is_local)
            except DataPlaneError:
                continue  # `make_resident` raises the reason
            if self._maker.key(checked) not in self._maker.quarantine:
                wanted.append(checked)
        self._start_all(wanted, deadline)

    def drop_stale(self, refs: Sequence[Ref]) -> None:
        """Drop the copies of other nodes' objects that are out of date: the ref says that its home has written another
        object since."""
        self._remote.drop_stale(refs)

    def prefetch(self, refs: Sequence[Ref], recipe: Mapping[str, Any]) -> int:
        """Begin to make the derived object of each source. These tasks run after all tasks that callers wait for. This
        waits for nothing.

        Return how many refs, counted from the first, are resident, running, bad or queued now; the rest does not fit
        into the window. If a prefetched object finds no room beside other unused ones, the queued ones are cancelled.
        Objects of other nodes are left to those nodes.
        """
        checked = parse_recipe(recipe).model_dump()
        wanted = [derived_ref(ref, checked, ref.node) for ref in refs]
        return next((at for at, ref in enumerate(wanted) if not self._begin_ahead(ref)), len(wanted))

    def quarantine(self) -> list[BadMedia]:
        """Return a record for every medium that could not be decoded."""
        return self._maker.quarantine.all()

    def stat(self) -> dict[str, int]:
        """Return the counters of objects that were made."""
        return {**self._maker.stat(), **self._remote.stat(), **self._prefetched.stat()}

    def _make_all(self, refs: Sequence[Ref], deadline: float) -> dict[Wanted, Ref | BadMedia]:
        made: dict[Wanted, Ref | BadMedia] = {}
        missing: dict[Wanted, Ref] = {}
        for ref in refs:
            key = self._maker.key(ref)
            if key in made or key in missing:
                continue
            entry = self._store.find(ref.name)
            bad = self._maker.quarantine.get(key)
            if bad is not None:
                made[key] = bad
            elif entry is not None:
                self._prefetched.use(ref.name)
                made[key] = self._maker.checked_label(entry.ref, ref, key)
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
        """Return an object that is being made, or its bad medium. If the task failed because of another caller's
        deadline or ref, try again."""
        while True:
            try:
                made = future.result(timeout=max(0.0, deadline - time.monotonic()))
                self._prefetched.use(made.name)
                return self._maker.checked_label(made, ref, key)
            except QuarantinedError:
                key = self._maker.key(ref)  # compute the key again: the dataset may have been ingested again
                bad = self._maker.quarantine.get(key)
                if bad is not None:
                    return bad
            except FutureTimeoutError as error:  # the task itself may have raised this too
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
        """Do the same as `_start` for many refs. Objects of other nodes are fetched together."""
        remote = [ref for ref in refs if self._remote.can_fetch(ref)]
        fetched = dict(zip(map(id, remote), self._remote.start(remote, deadline), strict=True))
        return [fetched[id(ref)] if id(ref) in fetched else self._start(ref, deadline) for ref in refs]

    def _start(self, ref: Ref, deadline: float) -> "tuple[Future[Ref], bool]":
        """Return the future of an object, and True if it was started for this caller, not for an earlier one."""
        with self._lock:
            future = self._in_flight.get(ref.name)
            if future is not None:
                self._pool.queue.promote(future)
                return future, False
            future = self._pool.submit(self._run, ref, partial(self._store.allocate, deadline=deadline))
            self._in_flight[ref.name] = future
            return future, True

    def _begin_ahead(self, ref: Ref) -> bool:
        """Queue an object that no caller waits for yet. Return False if the window is full."""
        is_there = self._maker.key(ref) in self._maker.quarantine or self._store.find(ref.name) is not None
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
                cancelled = self._pool.queue.cancel_waiting()
                self._in_flight = {name: future for name, future in self._in_flight.items() if future not in cancelled}
            self._prefetched.note_refusal()
            raise
        finally:
            self._prefetched.end(ref.name, made.nbytes if made else None)

    def _run(self, ref: Ref, allocate: Allocate) -> Ref:
        try:
            return self._maker.make(ref, allocate)
        finally:
            with self._lock:
                self._in_flight.pop(ref.name, None)


class _OverdueError(Exception):
    """The caller's deadline passed while the object was being made."""
