"""Objects whose home is another node: that node is asked first, then they are made here where that is possible.

Single flight: callers that want the same object while it is being fetched wait for one fetch.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.errors import DataPlaneError, DatasetError, NodeTimeoutError
from dataplane.core.lineage import missing_object_error
from dataplane.core.refs import Ref
from dataplane.datasets.catalog import Catalog
from dataplane.derive.derived_refs import checked_ref
from dataplane.storage.store import Store

_CONFIRM_S = 5.0

Make = Callable[[Ref, float], "Future[Ref]"]
"""A function that begins to make an object on this node, with a deadline."""

log = logging.getLogger(__name__)


class RemoteObjects:
    """The objects that a node fetches for its readers. Thread-safe."""

    def __init__(self, store: Store, datasets: Catalog, peers: PeerDirectory, fetcher: PeerFetcher, make: Make) -> None:
        self._store = store
        self._datasets = datasets
        self._peers = peers
        self._fetcher = fetcher
        self._make = make
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[Ref]] = {}

    def checked(self, ref: Ref, *, is_local: bool) -> Ref:
        """Check a client's ref. Return it with its home; the home is this node if no other node may be asked.

        Raises MissingObjectError for a plain object that no known node has.
        """
        home = self._peers.node_id if is_local else ref.node
        if ref.kind != "plain" and ref.lineage is not None:
            checked = checked_ref(ref, home)
            # the size decides how the object is fetched
            return replace(checked, nbytes=ref.nbytes, shape=(ref.nbytes,)) if ref.kind == "derived" else checked
        if home == self._peers.node_id:
            raise missing_object_error(ref.name, home)
        if not self.can_fetch(ref):
            raise self._peers.unknown(ref.name, home)
        return ref

    def can_fetch(self, ref: Ref) -> bool:
        """Return True if the ref's home is another node whose address is known."""
        return self._fetcher.can_fetch(ref)

    def check_home(self, ref: Ref) -> None:
        """Raise an error if only the object's home has it, and that home is an unknown node."""
        if ref.node != self._peers.node_id and not self.can_fetch(ref):
            raise self._peers.unknown(ref.name, ref.node)

    def drop_stale(self, refs: Sequence[Ref]) -> None:
        """Drop copies of other nodes' objects if the ref says, and their home confirms, that the home has written
        another object since.

        Waits for: those homes, a few seconds. A copy stays while its home does not reply.
        """
        until = time.monotonic() + _CONFIRM_S
        for ref in refs:
            if ref.version and ref.node != self._peers.node_id:
                entry = self._store.find(ref.name)
                if entry is None or entry.ref.node != ref.node or entry.ref.version == ref.version:
                    continue
                if self._fetcher.is_at_home(ref, until) and self._store.find(ref.name) is entry:
                    self._store.release([ref.name])

    def start(self, refs: Sequence[Ref], deadline: float) -> "list[tuple[Future[Ref], bool]]":
        """Return futures of objects for which `can_fetch` is True, and whether each was started for this caller."""
        started: list[tuple[Future[Ref], bool]] = []
        fetched: list[tuple[Ref, Future[Ref]]] = []
        for ref in refs:
            with self._lock:
                future = self._in_flight.get(ref.name)
                is_own = future is None
                if future is None:
                    future = self._in_flight[ref.name] = Future()
                    fetched.append((ref, future))
            started.append((future, is_own))
        try:
            self._fetch(fetched, deadline)
        except Exception as error:  # a future that stays in flight would make its name unreachable for ever
            for ref, future in fetched:
                self._land(ref, future, error)
        return started

    def stat(self) -> dict[str, int]:
        """Return the counters of fetching."""
        return self._fetcher.stat()

    def _fetch(self, items: "Sequence[tuple[Ref, Future[Ref]]]", deadline: float) -> None:
        """Fetch objects, together for each home. The results, or the errors, go to the futures."""
        groups: dict[bool, list[tuple[Ref, Future[Ref]]]] = {False: [], True: []}
        for ref, future in items:
            # look again: the object may have arrived just before it was in flight again
            entry = self._store.find(ref.name)
            if entry is not None:
                self._land(ref, future, entry.ref)
            else:
                groups[self._is_makeable(ref)].append((ref, future))
        for is_makeable, group in groups.items():
            waiting = {ref.name: future for ref, future in group}
            land = partial(self._after_fetch, waiting, deadline, is_makeable)
            self._fetcher.start([ref for ref, _ in group], deadline, land, is_makeable=is_makeable)

    def _is_makeable(self, ref: Ref) -> bool:
        """Return True if this node can make an object itself, perhaps from a source that it fetches."""
        if ref.kind != "source" or ref.lineage is None or not ref.lineage.dataset:
            return ref.kind == "derived"
        try:
            self._datasets.locate(ref.lineage)
        except DatasetError:
            return False
        return True

    def _after_fetch(
        self,
        waiting: "Mapping[str, Future[Ref]]",
        deadline: float,
        is_makeable: bool,
        ref: Ref,
        result: Ref | DataPlaneError,
    ) -> None:
        """Pass on a fetched object, or start making it here. Runs in a fetch thread."""
        future = waiting[ref.name]
        if not (is_makeable and isinstance(result, DataPlaneError)):
            self._land(ref, future, result)
            return
        log.info("%s is made here: %s", ref.name, result)
        try:
            made = self._make(ref, deadline)
        except Exception as error:
            self._land(ref, future, error)
        else:
            made.add_done_callback(partial(self._after_making, ref, future))

    def _after_making(self, ref: Ref, future: "Future[Ref]", made: "Future[Ref]") -> None:
        if made.cancelled():
            self._land(ref, future, NodeTimeoutError("the node is stopping; ask another one"))
        else:
            self._land(ref, future, made.exception() or made.result())

    def _land(self, ref: Ref, future: "Future[Ref]", result: Ref | BaseException) -> None:
        """End a fetch, so that a later caller starts a new one. A fetch that has ended already stays as it is."""
        with self._lock:
            if self._in_flight.get(ref.name) is not future:
                return
            del self._in_flight[ref.name]
        if isinstance(result, Ref):
            future.set_result(result)
        else:
            future.set_exception(result)
