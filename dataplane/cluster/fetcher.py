"""Fetches objects from their home nodes into this node's arena: each object once, for any number of readers.

The address of a node comes from `peer_directory.py`, never from a request. If a stream breaks, stalls or brings wrong
bytes, the objects that are not complete yet are requested again, at the address that the directory has then. The other
node is told not to ask further nodes, so no request can travel in a circle.
"""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials, connect
from dataplane.client.download import NUM_STREAMS, RANGES_FROM, Call, receive_many, receive_ranges
from dataplane.cluster.fetch_batch import ArenaSink, FetchBatch, Land, split_by_bytes
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.errors import (
    BadRequestError,
    ChecksumError,
    DataPlaneError,
    NodeTimeoutError,
    NodeUnavailableError,
    PeerError,
)
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import dump
from dataplane.core.refs import Ref
from dataplane.storage.store import Store

DOWN_S = 30.0
"""For this time, in seconds, a node that did not reply is not asked for objects that can also be made here."""
STALL_S = 20.0
"""The seconds after which a stream on which no data comes is cancelled."""
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MAX_WRONG = 3
"""The number of wrong transfers after which the network is not seen as the cause."""
_MAX_STREAMS = 16

log = logging.getLogger(__name__)


class PeerFetcher:
    """Makes objects of other nodes resident in a store. Thread-safe."""

    def __init__(
        self,
        store: Store,
        peers: PeerDirectory,
        *,
        credentials: Credentials | None = None,
        num_streams: int = NUM_STREAMS,
        stall_s: float = STALL_S,
    ) -> None:
        self.num_fetched = 0
        self.fetched_bytes = 0
        self.fetched_plain_bytes = 0
        self.num_fetch_retries = 0
        self._store = store
        self._peers = peers
        self._credentials = credentials
        self._num_streams = num_streams
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._flights: dict[str, list[fl.FlightClient]] = {}
        self._down: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(_MAX_STREAMS, thread_name_prefix="fetch")
        self._is_closed = False

    def can_fetch(self, ref: Ref) -> bool:
        """Return True if the ref's home is another node whose address is known."""
        return ref.node != self._peers.node_id and self._peers.find(ref.node) is not None

    def start(self, refs: Sequence[Ref], deadline: float, land: Land, *, is_makeable: bool) -> None:
        """Begin to fetch objects for which `can_fetch` is True. `land` is called for each object, in a fetch thread.

        If `is_makeable`, this node can make the objects itself. Then their home sends only what is resident there, and
        this node does not wait long. For an object that cannot be fetched, `land` gets the error of its home,
        OutOfSpaceError or PeerError.
        """
        batches: dict[str, list[Ref]] = {}
        for ref in refs:
            batch = f"{ref.node} {ref.name}" if ref.nbytes >= RANGES_FROM else ref.node
            batches.setdefault(batch, []).append(ref)
        for together in batches.values():
            for lane, part in enumerate(split_by_bytes(together, self._num_streams)):
                self._threads.submit(self._fetch, FetchBatch(part, land, is_makeable, deadline, lane))

    def is_at_home(self, ref: Ref, until: float) -> bool:
        """Return True if the ref's home replies that it holds exactly this object now. Waits for the reply, until
        `until` (monotonic)."""
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
        """Return the counters of fetching."""
        with self._lock:
            return {
                "num_fetched": self.num_fetched,
                "fetched_bytes": self.fetched_bytes,
                "fetched_plain_bytes": self.fetched_plain_bytes,
                "num_fetch_retries": self.num_fetch_retries,
            }

    def close(self) -> None:
        """Stop fetching. Streams that are open end with their connections."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            flights, self._flights = [one for many in self._flights.values() for one in many], {}
        for flight in flights:
            flight.close()

    # -- private: in a fetch thread --------------------------------------------------------------------------------

    def _fetch(self, batch: FetchBatch) -> None:
        """Try until every object is fetched or the time is over. `land` is called for every object in both cases."""
        try:
            self._try_until_over(batch)
        except Exception as error:
            if not self._is_closed:
                log.exception("fetching from node %s failed", batch.home)
            text = f"{type(error).__name__}: {error}"
            batch.fail_rest(lambda ref: PeerError(f"{ref.name}: {text}"))

    def _try_until_over(self, batch: FetchBatch) -> None:
        started, backoff_s, num_wrong = time.monotonic(), _BACKOFF_S, 0
        until = batch.until(started)
        uri = self._peers.find(batch.home)
        problem: Exception = PeerError("its address is gone")
        was_tried = False
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
                    found = from_flight(error, uri, "get", until - started) if _is_arrow(error) else error
                    is_over = isinstance(found, NodeTimeoutError) and time.monotonic() >= until
                    # otherwise the earlier error explains more than the end of the time
                    if not (is_over and was_tried):
                        problem = found
                    was_tried = True
                    if isinstance(problem, BadRequestError):
                        break
                    if not batch.rest:
                        return  # the connection broke over objects that no caller waits for
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

    def _try(self, batch: FetchBatch, uri: str, until: float) -> None:
        flights = self._connections(uri)
        sink = ArenaSink(self._store, batch, until, self._count)
        call = Call(ticket={"local": True, "make": not batch.is_makeable}, deadline=until, stall_s=self._stall_s)
        refs = sink.refs
        if len(refs) == 1 and refs[0].nbytes >= RANGES_FROM:
            receive_ranges(flights, refs[0], sink, call)
        else:
            receive_many(flights[batch.lane % len(flights)], refs, sink, call)

    def _count(self, refs: Sequence[Ref]) -> None:
        with self._lock:
            self.num_fetched += len(refs)
            self.fetched_bytes += sum(ref.nbytes for ref in refs)
            self.fetched_plain_bytes += sum(ref.nbytes for ref in refs if ref.kind == "plain")

    def _connections(self, uri: str) -> list[fl.FlightClient]:
        with self._lock:
            flights = self._flights.get(uri)
            if flights is None:
                flights = [connect(uri, self._credentials) for _ in range(self._num_streams)]
                self._flights[uri] = flights
            return flights

    def _forget(self, uri: str) -> None:
        """Open a new connection for the next request, because a broken connection may look intact for minutes. Other
        callers may still use the old one."""
        with self._lock:
            self._flights.pop(uri, None)


def _is_arrow(error: Exception) -> bool:
    return isinstance(error, pa.ArrowException)


def _gave_up(ref: Ref, uri: str | None, seconds: float, problem: Exception) -> DataPlaneError:
    kind = ChecksumError if isinstance(problem, ChecksumError) else PeerError
    return kind(
        f"{ref.name} could not be fetched from its home, node {ref.node} at {uri or 'an unknown address'}, in "
        f"{seconds:.1f} s ({problem}); see that this node runs and can be reached from here, or raise timeout_s"
    )
