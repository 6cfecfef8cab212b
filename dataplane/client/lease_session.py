"""The session of a reader with its node: the mapped segment, the stream that holds its leases, and their end.

The session's stream stays open until the last view is collected, even if a resolve timed out or the reader was closed:
a lease must never end while a view can still be read. If the node dies, the session is lost: its leases do not count
any more, and its mapping stays as long as views over it exist.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials, connect
from dataplane.client.inplace_stream import close_quietly
from dataplane.client.object_downloader import ObjectDownloader
from dataplane.client.retry import GRACE_S
from dataplane.core.errors import NodeUnavailableError, StreamLostError
from dataplane.core.hosts import default_host_id
from dataplane.core.json_body import dump, parse
from dataplane.core.refs import Ref
from dataplane.core.shared_files import FileMapping, map_segment
from dataplane.core.timers import TIMERS

TICK_S = 1.0
"""The maximum number of seconds between two checks of the streams for missed deadlines."""
_GATHER_S = 0.01
"""The seconds during which ended leases are collected, so that one call to the node returns many of them."""
_MAX_RELEASES = 8192
"""The maximum number of ended leases that one call returns to the node."""

log = logging.getLogger(__name__)


class ResolveStream:
    """An open DoExchange stream for resolve requests, used by one thread at a time."""

    def __init__(self, session: "LeaseSession", writer: fl.FlightStreamWriter, reader: fl.FlightStreamReader) -> None:
        self.session = session
        self._writer = writer
        self._reader = reader
        self._lock = threading.Lock()
        self._is_waiting = False
        self.is_overdue = False
        """True if a deadline passed and the stream was cancelled."""
        self.is_broken = False
        """True if the stream cannot be used again."""

    def ask(self, request: bytes, timeout_s: float) -> tuple[pa.RecordBatch | None, pa.Buffer | None]:
        """Send a request and return the reply: a record batch or None, and metadata or None.

        The call waits for the reply; after the deadline the stream is cancelled. If the call raises, the stream is
        cancelled too, so that the node ends the leases of a reply that did not arrive.
        """
        self._is_waiting = True
        try:
            with TIMERS.limit(time.monotonic() + timeout_s + GRACE_S, self._cut):
                self._writer.write_metadata(pa.py_buffer(request))
                chunk = self._reader.read_chunk()
            with self._lock:
                self._is_waiting = False
                if self.is_overdue:
                    raise fl.FlightTimedOutError("the reply came after the stream was cancelled")
        except BaseException:
            self.is_broken = True
            self._is_waiting = False
            self._reader.cancel()
            raise
        return chunk.data, chunk.app_metadata

    def _cut(self) -> None:
        """Cancel the stream, so that `ask` raises; do nothing if `ask` has its reply already."""
        with self._lock:
            if self._is_waiting:
                self.is_overdue = self.is_broken = True
                self._reader.cancel()

    def close(self) -> None:
        """Close this stream of requests. The leases that came over it stay: they end with the session's own stream."""
        close_quietly(self._writer)


class LeaseSession:
    """The session of a reader with its node, which holds the leases of the reader.

    Consumes: `ended`, the lease numbers from finalisers of views; None means: close after the last lease.
    """

    def __init__(
        self, uri: str, timeout_s: float, credentials: Credentials | None = None, open_s: float | None = None
    ) -> None:
        """Open a session with the node at `uri`. `timeout_s` is the timeout of each call; `open_s`, if given, replaces
        it for the first call."""
        self.uri = uri
        self.timeout_s = timeout_s
        self.ended: SimpleQueue[int | None] = SimpleQueue()
        self.arena: FileMapping | None = None
        """The mapping of the node's arena; None if this process cannot map it and copies objects over Flight."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._num_leases = 0
        self._num_in_flight = 0
        self._is_closing = False
        self._told = threading.Event()
        """The event that is set once the node knows all leases that ended before `close`, or once this session's thread
        has ended."""
        self.is_lost = False
        """True if the node is gone or does not know this session any more."""
        self._flight = connect(uri, credentials)
        self._copies = ObjectDownloader(uri, credentials)
        hello = self._open(open_s or timeout_s)
        self._token = str(hello["session"])
        self.incarnation = str(hello["incarnation"])
        """The id of this run of the node's process. After a restart the node has another id and other memory."""
        self.node = str(hello["node"])
        """The id of the node."""
        self._map(hello)
        self._thread = threading.Thread(target=self._keep, name="leases", daemon=True)
        self._thread.start()

    def check_usable(self) -> None:
        """Raise an error if this session cannot resolve: it is lost or closed, or it was made before a fork."""
        if os.getpid() != self._pid:
            raise NodeUnavailableError(f"this reader was made in process {self._pid}; make one after the fork")
        if self.is_lost:
            raise StreamLostError(f"the node at {self.uri} restarted, or lost this reader: make a new Reader")
        if self._is_closing:
            raise NodeUnavailableError(f"this reader of {self.uri} is closed; make a new one")

    def begin(self) -> None:
        """Begin a resolve: the session stays open until `finish`. Raises an error if the session cannot resolve any
        more."""
        with self._lock:
            self.check_usable()
            self._num_in_flight += 1

    def finish(self) -> None:
        """End a resolve. Call this after `add_leases` for the leases that the node granted to the resolve."""
        with self._lock:
            self._num_in_flight -= 1

    @property
    def has_views(self) -> bool:
        """True if views of this lost session may still be alive."""
        self._told.wait(2 * TICK_S)  # the session's thread may still be counting ended leases
        with self._lock:
            with suppress(Empty):
                while True:  # never wait: the session's thread takes from it too
                    self._num_leases -= self.ended.get_nowait() is not None
            return self._num_leases > 0

    def lose(self) -> None:
        """Mark the session as lost, because the node is gone or does not know the session. Views stay readable.

        The leases do not count any more, and the session's thread ends.
        """
        self.is_lost = True
        self.ended.put(None)

    def add_leases(self, count: int) -> None:
        """Count leases that the node granted. The number of each lease is put into the queue `ended` when its view is
        gone."""
        with self._lock:
            self._num_leases += count

    def open_stream(self) -> ResolveStream:
        """Open a new resolve stream whose leases belong to this session."""
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "resolve", "session": self._token}))
        return ResolveStream(self, *self._flight.do_exchange(descriptor))

    def fetch(self, refs: Sequence[Ref], deadline: float) -> list[np.ndarray]:
        """Return read-only private copies over DoGet, for readers that cannot map the node's shared memory.

        `deadline` is in seconds of `time.monotonic`.
        """
        return self._copies.fetch(refs, deadline)

    def close(self) -> None:
        """End the session as soon as no view is left; at once if there is none.

        The call waits at most two seconds until the node knows the leases that ended before this call.
        """
        with self._lock:
            self._is_closing = True
        self.ended.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._told.wait(2 * TICK_S)

    def _open(self, timeout_s: float) -> dict[str, Any]:
        """Open the session's stream and return the node's first message."""
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "session"}))
        self._writer, reader = self._flight.do_exchange(descriptor)
        self._reader = reader
        try:
            with TIMERS.limit(time.monotonic() + timeout_s, reader.cancel):
                return parse(reader.read_chunk().app_metadata, "the reply to session")
        except StopIteration:
            raise StreamLostError(f"{self.uri} ended the session at once; is it a data-plane node?") from None

    def _map(self, hello: dict[str, Any]) -> None:
        """Map the node's arena read-only into this process if the arena is on this machine."""
        if hello["host"] != default_host_id():
            log.info("the node at %s runs on another machine; objects are copied over Flight", self.uri)
            return
        try:
            self.arena = map_segment(hello["segments"][0])
        except OSError as error:
            log.warning("the memory of %s cannot be mapped (%s); objects are copied over Flight", self.uri, error)

    # -- private: the session's thread -----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Report ended leases to the node, until the session is lost, or is closed and has no leases.

        *Consumes* `ended`. *Produces* `end_leases` calls.
        """
        while True:
            leases, was_closed = self._collect()
            if leases and not self.is_lost and not self._end(leases):
                self.is_lost = True
            with self._lock:
                self._num_leases -= len(leases)
                if self.is_lost:
                    break  # without a node there are no leases
                if self._is_closing and self._num_leases <= 0 and not self._num_in_flight:
                    break
            if was_closed:
                self._told.set()
        close_quietly(self._writer)
        self._flight.close()
        self._copies.close()
        self._told.set()

    def _collect(self) -> tuple[list[int], bool]:
        """Return the lease numbers that came in, and True if `close` was called and all leases that ended before it are
        included.

        The call waits at most `TICK_S` for the first lease number.
        """
        leases: list[int] = []
        was_closed = False
        try:
            lease = self.ended.get(timeout=TICK_S)
            time.sleep(_GATHER_S)
            while True:
                if lease is None:
                    self._is_closing = was_closed = True
                else:
                    leases.append(lease)
                if len(leases) >= _MAX_RELEASES:
                    break
                lease = self.ended.get_nowait()
        except Empty:
            pass
        return leases, was_closed

    def _end(self, leases: list[int]) -> bool:
        """Tell the node which leases ended. Return False if the node is gone."""
        body = dump({"session": self._token, "leases": leases})
        try:
            list(self._flight.do_action(fl.Action("end_leases", body), fl.FlightCallOptions(timeout=self.timeout_s)))
        except pa.ArrowException as error:
            log.info("the node at %s took no leases back: %s", self.uri, str(error)[:120])
            return not isinstance(error, fl.FlightUnavailableError)
        return True
