"""The session of a reader with its node: the mapped segment, and the streams that ask for leases.

The leases belong to the session, not to a stream, and end one by one when their views are collected: also if a resolve
timed out, a connection broke, or the reader was closed. If the node dies, the session is lost: its leases do not count
any more, and its mapping stays as long as views over it exist.
"""

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials
from dataplane.client.node_session import NodeSession
from dataplane.client.object_downloader import ObjectDownloader
from dataplane.client.retry import GRACE_S
from dataplane.client.session_stream import close_quietly
from dataplane.core.arena_mapping import map_arena, revoke
from dataplane.core.refs import Ref
from dataplane.core.shared_files import FileMapping
from dataplane.core.timers import TIMERS

log = logging.getLogger(__name__)


class ResolveStream:
    """An open DoExchange stream for resolve requests, used by one thread at a time."""

    def __init__(self, session: "LeaseSession") -> None:
        self.session = session
        self._number, self._writer, self._reader = session.node.open_stream("resolve")
        self._lock = threading.Lock()
        self._is_waiting = False
        self._num_heard = 0
        self.is_overdue = False
        """True if a deadline passed and the stream was cancelled."""
        self.is_broken = False
        """True if the stream cannot be used again."""

    def ask(self, request: bytes, timeout_s: float) -> tuple[pa.RecordBatch | None, pa.Buffer | None]:
        """Send a request and return the reply: a record batch or None, and metadata or None.

        The call waits for the reply; after the deadline the stream is cancelled. If the call raises, the stream is
        cancelled too, and the node is told that the reply did not arrive, so that it ends the leases of that reply.
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
            self._num_heard += 1
        except BaseException:
            self.is_broken = True
            self._is_waiting = False
            self._reader.cancel()
            self.session.node.drop_stream(self._number, self._num_heard)
            raise
        return chunk.data, chunk.app_metadata

    def _cut(self) -> None:
        """Cancel the stream, so that `ask` raises; do nothing if `ask` has its reply already."""
        with self._lock:
            if self._is_waiting:
                self.is_overdue = self.is_broken = True
                self._reader.cancel()

    def close(self) -> None:
        """Close this stream of requests. The leases that came over it stay: they belong to the session."""
        close_quietly(self._writer)


class LeaseSession:
    """The session of a reader with its node, and the mapping of the node's arena."""

    def __init__(
        self, uri: str, timeout_s: float, credentials: Credentials | None = None, open_s: float | None = None
    ) -> None:
        """Open a session with the node at `uri`. `timeout_s` is the timeout of each call; `open_s`, if given, replaces
        it for the first call."""
        self.node = NodeSession(uri, "reader", timeout_s, credentials, open_s)
        """What the node knows of this process, and which leases it holds."""
        self.node_id = str(self.node.hello["node"])
        """The id of the node."""
        self.ended = self.node.ended
        """The queue for the numbers of leases whose views are gone."""
        self.arena: FileMapping | None = None
        """The mapping of the node's arena; None if this process cannot map it and copies objects over Flight."""
        self._copies = ObjectDownloader(uri, credentials)
        self.node.on_end = self._copies.close
        if self.node.is_present:
            self._map()

    def fetch(self, refs: Sequence[Ref], deadline: float) -> list[np.ndarray]:
        """Return read-only private copies over DoGet, for readers that cannot map the node's shared memory.

        `deadline` is in seconds of `time.monotonic`.
        """
        return self._copies.fetch(refs, deadline)

    def close(self) -> None:
        """End the session as soon as no view is left; at once if there is none."""
        self.node.close()

    def _map(self) -> None:
        """Map the node's arena read-only into this process."""
        try:
            self.arena = arena = map_arena(self.node.hello["segments"][0])
        except OSError as error:
            log.warning("the memory of %s cannot be mapped (%s); objects are copied over Flight", self.node.uri, error)
        else:
            self.node.on_same_node_lost = lambda: revoke(arena)
