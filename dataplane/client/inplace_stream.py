"""The stream with which a client on the node's machine allocates slabs in the arena and seals what it wrote there.

`inplace_put.py` and `writer.py` use it.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.node_session import NodeSession
from dataplane.client.retry import GRACE_S
from dataplane.client.session_stream import close_quietly
from dataplane.core.errors import NodeUnavailableError, StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.json_body import dump, parse
from dataplane.core.refs import Ref
from dataplane.core.timers import TIMERS

log = logging.getLogger(__name__)


class InplaceStream:
    """A DoExchange stream with the verb `put`, for one thread at a time.

    Its slabs belong to the session. They go back to the arena when they are sealed, when `close` says that this
    process writes no more into them, or when this process ends; not when the connection breaks.
    """

    def __init__(self, session: NodeSession, deadline: float) -> None:
        """Open a stream of a session. Raises SessionLostError if the node does not know the session."""
        self.session = session
        self._uri = session.uri
        self.is_open = True
        self.has_slabs = False
        """True if slabs may belong to this stream: the node was asked for some, and they are not sealed."""
        self._number, self._writer, self._reader = session.open_stream("put")
        hello = self._read(deadline)
        error = from_body(hello)
        if error is not None:
            self.close()
            raise error
        self.segment: Mapping[str, Any] = hello["segments"][0]
        """The path, size in bytes, device and inode of the arena."""

    def allocate(self, sizes: Sequence[int], scope: str | None, deadline: float) -> list[int]:
        """Wait for slabs of these sizes in bytes until `deadline`, and return their offsets in the arena. The slabs
        belong to this stream until they are sealed."""
        left_s = max(0.01, deadline - time.monotonic())
        self.has_slabs = True
        reply = self._ask({"allocate": list(sizes), "timeout_s": left_s, "scope": scope}, deadline)
        offsets = [int(place["offset"]) for place in reply["places"]]
        if any(not 0 <= at <= self.segment["nbytes"] - nbytes for at, nbytes in zip(offsets, sizes, strict=True)):
            raise NodeUnavailableError(f"{self._uri} gave a slab outside of its arena: it is not a data-plane node")
        return offsets

    def seal(self, bodies: Sequence[Mapping[str, Any]], deadline: float) -> list[Ref]:
        """Make objects of the written slabs, one body for each, and return their refs."""
        reply = self._ask({"seal": [dict(body) for body in bodies]}, deadline)
        self.has_slabs = False
        return [Ref.from_dict(ref) for ref in reply["refs"]]

    def _ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return the node's reply. Raises the error that the node replies; closes the stream if it
        breaks.

        The call waits for the reply until `deadline` (seconds of `time.monotonic`).
        """
        try:
            self.tell(request)
        except pa.ArrowException:
            self.close()
            raise
        reply = self._read(deadline)
        error = from_body(reply)
        if error is not None:
            self.has_slabs = False  # the node took them back
            raise error
        return reply

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no reply. If the message is wrong, the node says so in its reply to the next
        request."""
        self._writer.write_metadata(pa.py_buffer(dump(message)))

    def close(self) -> None:
        """End the stream; the node frees its unsealed slabs. The caller writes no more into them."""
        if self.is_open:
            self.is_open = False
            close_quietly(self._writer)
            if self.has_slabs:
                self.session.drop_stream(self._number, 0)

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next reply. If it does not come before the deadline, the stream is cancelled and closed."""
        is_overdue = threading.Event()

        def cut() -> None:
            is_overdue.set()
            self._reader.cancel()

        try:
            with TIMERS.limit(max(deadline, time.monotonic()) + GRACE_S, cut):
                chunk = self._reader.read_chunk()
            return parse(chunk.app_metadata, "the reply to put")
        except pa.ArrowException as error:
            self.close()
            raise fl.FlightTimedOutError("no reply") if is_overdue.is_set() else error from error
        except StopIteration:
            self.close()
            raise StreamLostError(
                f"{self._uri} ended the stream in the middle of a put; is the node running?"
            ) from None
