"""Fetching objects from the nodes that refs call home, into this node's arena: each once, however many readers ask.

The address comes from `peers.py`, never from a request. A stream that breaks, stalls or brings wrong bytes is tried
again, at the address that the directory then has, for what is not whole yet. The other node is told to ask nobody else,
so that no request goes round in circles.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.connect import Credentials, connect
from dataplane.entries import Slab
from dataplane.errors import (
    BadRequestError,
    ChecksumError,
    DataPlaneError,
    NodeTimeoutError,
    NodeUnavailableError,
    PeerError,
)
from dataplane.fetch import NUM_STREAMS, RANGES_FROM, Call, receive_many, receive_ranges
from dataplane.lineages import check_claim
from dataplane.peers import Peers
from dataplane.refs import Ref
from dataplane.store import Store
from dataplane.watch import Watch
from dataplane.wire import dump, from_flight

STALL_S = 20.0
"""A stream on which nothing comes for this long is cut; a sender that waits says so every few seconds."""
ELSEWHERE_S = 5.0
"""How long to try for what can also be made here."""
DOWN_S = 30.0
"""For this long a node that did not answer is not asked for what can also be made here."""
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MAX_WRONG = 3
"""Wrong bytes this often are not the network's fault."""
_MAX_STREAMS = 16
_LANE_BYTES = 8 << 20
"""Of objects that come together: each connection more is worth opening from about this size on."""

_Item = tuple[Ref, "Future[Ref]"]

log = logging.getLogger(__name__)


class PeerFetcher:
    """Makes objects of other nodes resident in a store. Thread-safe."""

    def __init__(
        self,
        store: Store,
        peers: Peers,
        *,
        credentials: Credentials | None = None,
        num_streams: int = NUM_STREAMS,
        stall_s: float = STALL_S,
    ) -> None:
        self.num_fetched = 0
        self.fetched_bytes = 0
        self.num_fetch_retries = 0
        self._store = store
        self._peers = peers
        self._credentials = credentials
        self._num_streams = num_streams
        self._watch = Watch(stall_s)
        self._lock = threading.Lock()
        self._flights: dict[str, list[fl.FlightClient]] = {}
        self._down: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(_MAX_STREAMS, thread_name_prefix="fetch")
        self._is_closed = False

    def can_fetch(self, ref: Ref) -> bool:
        """Whether the ref's home is another node whose address is known."""
        return ref.node != self._peers.node_id and self._peers.find(ref.node) is not None

    def start(self, refs: Sequence[Ref], deadline: float, *, is_makeable: bool) -> "list[Future[Ref]]":
        """Begin to fetch objects of which `can_fetch` holds; a future for each.

        `is_makeable` says that this node can make them itself: then their home sends only what is resident there, and
        is not waited for long. Raises in the futures: what the home says of an object, OutOfSpaceError, PeerError.
        """
        futures: list[Future[Ref]] = [Future() for _ in refs]
        batches: dict[str, list[_Item]] = {}
        for ref, future in zip(refs, futures, strict=True):
            batch = f"{ref.node} {ref.name}" if ref.nbytes >= RANGES_FROM else ref.node
            batches.setdefault(batch, []).append((ref, future))
        for items in batches.values():
            for lane, part in enumerate(_parted(items, self._num_streams)):
                self._threads.submit(self._fetch, _Batch(part, is_makeable, deadline, lane))
        return futures

    def is_at_home(self, ref: Ref, until: float) -> bool:
        """Whether the ref's home says now that it holds just what the ref says. Waits for its answer, until `until`."""
        uri = self._peers.find(ref.node)
        if uri is None:
            return False
        ticket = {"ref": ref.to_dict(), "start": 0, "length": 0, "local": True, "make": False}
        options = fl.FlightCallOptions(timeout=max(0.01, until - time.monotonic()))
        try:
            self._connections(uri)[0].do_get(fl.Ticket(dump(ticket)), options).read_all()
        except pa.ArrowException as error:
            log.info("node %s does not confirm %s: %s", ref.node, ref.name, str(error)[:200])
            return False
        return True

    def stat(self) -> dict[str, int]:
        """Counts of what was fetched."""
        with self._lock:
            return {
                "num_fetched": self.num_fetched,
                "fetched_bytes": self.fetched_bytes,
                "num_fetch_retries": self.num_fetch_retries,
            }

    def close(self) -> None:
        """Fetch nothing more; streams in flight are cut by their connections' end."""
        self._is_closed = True
        self._watch.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            flights, self._flights = [one for many in self._flights.values() for one in many], {}
        for flight in flights:
            flight.close()

    # -- private: in a fetch thread --------------------------------------------------------------------------------

    def _fetch(self, batch: "_Batch") -> None:
        """Try until nothing is left to fetch or the time is over; whatever happens every future gets its end."""
        try:
            self._try_until_over(batch)
        except Exception as error:
            log.exception("fetching from node %s failed", batch.home)
            text = f"{type(error).__name__}: {error}"
            batch.fail_rest(lambda ref: PeerError(f"{ref.name}: {text}"))

    def _try_until_over(self, batch: "_Batch") -> None:
        started, backoff_s, num_wrong = time.monotonic(), _BACKOFF_S, 0
        until = batch.until(started)
        uri = self._peers.find(batch.home)
        problem: Exception = PeerError("its address is gone")
        if batch.is_makeable and time.monotonic() < self._down.get(batch.home, 0.0):
            problem, until = PeerError("it did not answer a moment ago"), started
        while batch.rest and time.monotonic() < until and not self._is_closed:
            if uri is not None:
                try:
                    self._try(batch, uri, until)
                    self._down.pop(batch.home, None)
                    if not batch.rest:
                        return
                    problem = ChecksumError("its stream ended before everything had come")
                except (pa.ArrowException, DataPlaneError, StopIteration) as error:
                    problem = from_flight(error, uri, "get", until - started) if _is_arrow(error) else error
                    if isinstance(problem, BadRequestError):
                        break
                    num_wrong += isinstance(problem, ChecksumError)
                if num_wrong >= _MAX_WRONG:
                    break
                self._forget(uri)
            with self._lock:
                self.num_fetch_retries += 1
            log.info("fetching from node %s at %s: %s; once more in %.1f s", batch.home, uri, problem, backoff_s)
            time.sleep(min(backoff_s, max(0.0, until - time.monotonic())))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            uri = self._peers.find_again(batch.home)
        if isinstance(problem, (NodeUnavailableError, NodeTimeoutError)):
            self._down[batch.home] = time.monotonic() + DOWN_S
        seconds = time.monotonic() - started
        batch.fail_rest(lambda ref: _gave_up(ref, uri, seconds, problem))

    def _try(self, batch: "_Batch", uri: str, until: float) -> None:
        flights = self._connections(uri)
        sink = _ArenaSink(self, batch, until)
        call = Call(ticket={"local": True, "make": not batch.is_makeable}, deadline=until, watch=self._watch)
        refs = sink.refs
        if len(refs) == 1 and refs[0].nbytes >= RANGES_FROM:
            receive_ranges(flights, refs[0], sink, call)
        else:
            receive_many(flights[batch.lane % len(flights)], refs, sink, call)

    def _connections(self, uri: str) -> list[fl.FlightClient]:
        with self._lock:
            flights = self._flights.get(uri)
            if flights is None:
                flights = [connect(uri, self._credentials) for _ in range(self._num_streams)]
                self._flights[uri] = flights
            return flights

    def _forget(self, uri: str) -> None:
        """Connect anew next time; a broken connection may look whole for minutes. Others may still use these."""
        with self._lock:
            self._flights.pop(uri, None)


class _Batch:
    """Objects that are fetched together, and what waits for them."""

    def __init__(self, items: "Sequence[_Item]", is_makeable: bool, deadline: float, lane: int) -> None:
        self.lane = lane
        self.home = items[0][0].node
        self.is_makeable = is_makeable
        self.rest = dict(enumerate(items))
        self._deadline = deadline

    def until(self, now: float) -> float:
        """When to give up: early enough to say why, and to make it here if that is possible."""
        left = self._deadline - now
        return now + (min(ELSEWHERE_S, left / 2) if self.is_makeable else left - min(0.5, left / 10))

    def done(self, key: int, ref: Ref) -> None:
        """An object is resident."""
        item = self.rest.pop(key, None)
        if item is not None:
            item[1].set_result(ref)

    def failed(self, key: int, error: DataPlaneError) -> None:
        """An object cannot be had."""
        item = self.rest.pop(key, None)
        if item is not None:
            item[1].set_exception(error)

    def fail_rest(self, error: Callable[[Ref], DataPlaneError]) -> None:
        """None of what is left can be had."""
        for key, (ref, _) in list(self.rest.items()):
            self.failed(key, error(ref))


class _ArenaSink:
    """Slabs of the arena; what came whole is sealed, and may be evicted: its home has it."""

    def __init__(self, fetcher: PeerFetcher, batch: _Batch, until: float) -> None:
        self._keys = list(batch.rest)
        self.refs = [batch.rest[key][0] for key in self._keys]
        self._fetcher = fetcher
        self._batch = batch
        self._until = until
        self._slabs: dict[int, Slab] = {}

    def open(self, at: int, ref: Ref) -> np.ndarray:
        """A slab for the object."""
        check_claim(self.refs[at], ref)
        slab = self._fetcher._store.allocate(ref.nbytes, self._until)
        self._slabs[at] = slab
        return self._fetcher._store.view(slab)

    def done(self, at: int, ref: Ref, digest: str) -> None:
        """Publish it."""
        fetcher = self._fetcher
        entry = fetcher._store.seal(self._slabs.pop(at), ref, is_held=False, digest=digest)
        try:
            check_claim(ref, entry.ref)  # the name may have been taken here meanwhile
        except ChecksumError as error:
            self.failed(at, error)
            return
        with fetcher._lock:
            fetcher.num_fetched += 1
            fetcher.fetched_bytes += ref.nbytes
        self._batch.done(self._keys[at], entry.ref)

    def give_up(self, at: int) -> None:
        """Give the slab back."""
        self._fetcher._store.abort(self._slabs.pop(at))

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Tell whoever waits for it."""
        self._batch.failed(self._keys[at], error)


def _parted(items: Sequence[_Item], num_streams: int) -> list[list[_Item]]:
    """The objects in groups of about the same bytes, one for each connection: one carries one core's worth."""
    total = sum(ref.nbytes for ref, _ in items)
    lanes: list[list[_Item]] = [[] for _ in range(min(num_streams, os.cpu_count() or 1, total // _LANE_BYTES) or 1)]
    sizes = [0] * len(lanes)
    for item in items:
        lane = sizes.index(min(sizes))
        lanes[lane].append(item)
        sizes[lane] += item[0].nbytes
    return [lane for lane in lanes if lane]


def _is_arrow(error: Exception) -> bool:
    return isinstance(error, pa.ArrowException)


def _gave_up(ref: Ref, uri: str | None, seconds: float, problem: Exception) -> DataPlaneError:
    kind = ChecksumError if isinstance(problem, ChecksumError) else PeerError
    return kind(
        f"{ref.name} could not be fetched from its home, node {ref.node} at {uri or 'an unknown address'}, in "
        f"{seconds:.1f} s ({problem}); see that this node runs and can be reached from here, or raise timeout_s"
    )
