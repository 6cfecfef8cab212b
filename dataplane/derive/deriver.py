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
from dataclasses import dataclass, field
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
from dataplane.derive.materializer import Materializer, QuarantinedError, Wanted
from dataplane.derive.prefetch import WINDOW, PrefetchedObjects
from dataplane.derive.quarantine import Key
from dataplane.media.recipes import parse_recipe
from dataplane.storage.store import Store

FETCH_AGAIN_S = 1.0
"""A failed fetch is not retried for another caller who has less than this time left, in seconds."""
_GRACE_S = 0.1
"""The time after the deadline, in seconds, in which a task may still say why it did not end in time: its own error says
more."""


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
        self._remote = RemoteObjects(store, datasets, peers, fetcher, self._make_here)
        self._maker = Materializer(store, datasets, pool, node_id, self._remote, self.make_resident)
        self._prefetched = PrefetchedObjects(store)
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Ref]] = {}

    def derive(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> list[Ref | BadMedia]:
        """Return the derived object that `recipe` makes of each source; what is not resident is made now. A medium that
        cannot be decoded gives BadMedia.

        Waits for: the pool, and for room in the arena. Raises NodeTimeoutError at `deadline` (monotonic).
        """
        return self.finish(self.begin(refs, recipe, deadline), deadline)

    def begin(self, refs: Sequence[Ref], recipe: Mapping[str, Any], deadline: float) -> "Begun":
        """Begin to make the derived object of each source, without waiting."""
        return self._begin_all(self._derived(refs, recipe), deadline)

    def finish(self, begun: "Begun", deadline: float) -> list[Ref | BadMedia]:
        """Wait for what `begin` began, and return the results like `derive`."""
        made = self._finish_all(begun, deadline)
        return [self._maker.renamed(made[wanted.key], wanted) for wanted in begun.wanted]

    def make_resident(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Make every object resident that is not: fetch it, or make it again. If that is impossible, raise the reason.

        If `is_local`, the request comes from another node. That node asks further nodes itself, so no request can
        travel in a circle.
        """
        wanted = [self._maker.wanted(self._remote.checked(ref, is_local=is_local)) for ref in refs]
        for made in self._finish_all(self._begin_all(wanted, deadline), deadline).values():
            if isinstance(made, BadMedia):
                raise BadMediaError(f"{made.name} ({made.shard} {made.key}) is in quarantine: {made.reason}")

    def start(self, refs: Sequence[Ref], deadline: float, *, is_local: bool = False) -> None:
        """Begin to make objects in parallel, without waiting. `make_resident` then waits for the results."""
        wanted = []
        for ref in refs:
            try:
                checked = self._maker.wanted(self._remote.checked(ref, is_local=is_local))
            except DataPlaneError:
                continue  # `make_resident` raises the reason
            if checked.key not in self._maker.quarantine:
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
        derived = self._derived(refs, recipe)
        return next((at for at, wanted in enumerate(derived) if not self._begin_ahead(wanted)), len(derived))

    def quarantine(self) -> list[BadMedia]:
        """Return a record for every medium that could not be decoded."""
        return self._maker.quarantine.all()

    def stat(self) -> dict[str, int]:
        """Return the counters of objects that were made."""
        return {**self._maker.stat(), **self._remote.stat(), **self._prefetched.stat()}

    def _make_here(self, ref: Ref, deadline: float) -> "Future[Ref]":
        return self._start(self._maker.wanted(ref), deadline)[0]

    def _derived(self, refs: Sequence[Ref], recipe: Mapping[str, Any]) -> list[Wanted]:
        """Return the objects that a recipe makes of these sources."""
        checked = parse_recipe(recipe).to_dict()
        return [self._maker.wanted(derived_ref(ref, checked, ref.node)) for ref in refs]

    def _begin_all(self, wanted: Sequence[Wanted], deadline: float) -> "Begun":
        begun, missing = Begun(wanted), dict[Key, Wanted]()
        for item in wanted:
            if item.key in begun.made or item.key in missing:
                continue
            bad, entry = self._maker.quarantine.get(item.key), self._store.find(item.ref.name)
            if bad is not None:
                begun.made[item.key] = bad
            elif entry is not None:
                self._prefetched.use(item.ref.name)
                begun.made[item.key] = self._maker.checked_label(entry.ref, item)
            else:
                missing[item.key] = item
        started = self._start_all(list(missing.values()), deadline)
        begun.started = [(item, *task) for item, task in zip(missing.values(), started, strict=True)]
        return begun

    def _finish_all(self, begun: "Begun", deadline: float) -> dict[Key, Ref | BadMedia]:
        for num_done, (wanted, future, is_own) in enumerate(begun.started):
            try:
                begun.made[wanted.key] = self._wait(wanted, future, is_own, deadline)
            except _OverdueError as error:
                num_done += sum(other.done() for _, other, _ in begun.started[num_done:])
                raise NodeTimeoutError(
                    f"made {num_done} of {len(begun.started)} objects before the deadline, waiting for "
                    f"{wanted.ref.name}; ask for fewer at once, raise timeout_s, or start the node with more --workers"
                ) from error
        return begun.made

    def _wait(self, wanted: Wanted, future: "Future[Ref]", is_own: bool, deadline: float) -> Ref | BadMedia:
        """Return an object that is being made, or its bad medium. If the task failed because of another caller's
        deadline or ref, try again."""
        while True:
            try:
                made = future.result(timeout=max(0.0, deadline + _GRACE_S - time.monotonic()))
                self._prefetched.use(made.name)
                return self._maker.checked_label(made, wanted)
            except QuarantinedError:
                bad = self._maker.quarantine.get(wanted.key)
                if bad is not None:
                    return bad
                wanted = self._maker.wanted(wanted.ref)  # the dataset may have been ingested again
            except FutureTimeoutError as error:  # the task itself may have raised this too
                if not future.done():
                    raise _OverdueError from error
                if future.exception() is not error:
                    continue  # it ended just after the deadline
                if is_own or time.monotonic() >= deadline:
                    raise
            except DataPlaneError as error:
                needed_s = FETCH_AGAIN_S if isinstance(error, PeerError) else 0.0
                if is_own or time.monotonic() + needed_s >= deadline:
                    raise
            future, is_own = self._start_all([wanted], deadline)[0]

    def _start_all(self, wanted: Sequence[Wanted], deadline: float) -> "list[tuple[Future[Ref], bool]]":
        """Do the same as `_start` for many objects. Objects of other nodes are fetched together."""
        remote = [item.ref for item in wanted if self._remote.can_fetch(item.ref)]
        fetched = dict(zip(map(id, remote), self._remote.start(remote, deadline), strict=True)) if remote else {}
        return [fetched[id(item.ref)] if id(item.ref) in fetched else self._start(item, deadline) for item in wanted]

    def _start(self, wanted: Wanted, deadline: float) -> "tuple[Future[Ref], bool]":
        """Return the future of an object, and True if it was started for this caller, not for an earlier one."""
        name = wanted.ref.name
        with self._lock:
            future = self._in_flight.get(name)
            if future is not None:
                self._pool.queue.promote(future)
                return future, False
            future = self._pool.submit(self._run, wanted, partial(self._store.allocate, deadline=deadline))
            self._in_flight[name] = future
            return future, True

    def _begin_ahead(self, wanted: Wanted) -> bool:
        """Queue an object that no caller waits for yet. Return False if the window is full."""
        ref = wanted.ref
        is_there = wanted.key in self._maker.quarantine or self._store.find(ref.name) is not None
        is_there = is_there or self._remote.can_fetch(ref)
        with self._lock:
            if is_there or ref.name in self._in_flight:
                return True
            if self._pool.queue.num_ahead >= WINDOW:
                return False
            self._in_flight[ref.name] = self._pool.queue.submit(partial(self._run_ahead, wanted), is_urgent=False)
            return True

    def _run_ahead(self, wanted: Wanted) -> Ref:
        name = wanted.ref.name
        self._prefetched.begin(name)
        made = None
        try:
            made = self._run(wanted, self._prefetched.allocate)
            return made
        except OutOfSpaceError:
            with self._lock:
                cancelled = self._pool.queue.cancel_waiting()
                self._in_flight = {name: future for name, future in self._in_flight.items() if future not in cancelled}
            self._prefetched.note_refusal()
            raise
        finally:
            self._prefetched.end(name, made.nbytes if made else None)

    def _run(self, wanted: Wanted, allocate: Allocate) -> Ref:
        try:
            return self._maker.make(wanted, allocate)
        finally:
            with self._lock:
                self._in_flight.pop(wanted.ref.name, None)


@dataclass(slots=True)
class Begun:
    """The objects that one caller wants: those that are there, and those that are being made."""

    wanted: Sequence[Wanted]
    made: dict[Key, Ref | BadMedia] = field(default_factory=dict)
    started: list[tuple[Wanted, Future[Ref], bool]] = field(default_factory=list)
    """Each with its future, and True if it was started for this caller."""


class _OverdueError(Exception):
    """The caller's deadline passed while the object was being made."""
