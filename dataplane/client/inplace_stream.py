"""The stream with which a client on the node's machine allocates slabs in the arena and seals what it wrote there.

`inplace_put.py` and `writer.py` use it.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import GRACE_S
from dataplane.core.errors import NodeUnavailableError, StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.hosts import default_host_id
from dataplane.core.json_body import dump, parse
from dataplane.core.refs import Ref
from dataplane.core.timers import TIMERS

log = logging.getLogger(__name__)


class InplaceStream:
    """A DoExchange stream with the verb `put`, for one thread at a time. When it closes, the node frees its unsealed
    slabs."""

    def __init__(self, flight: fl.FlightClient, uri: str, deadline: float) -> None:
        self._uri = uri
        self.is_open = True
        self._writer, self._reader = flight.do_exchange(fl.FlightDescriptor.for_command(dump({"verb": "put"})))
        hello = self._read(deadline)
        self.segment: Mapping[str, Any] = hello["segments"][0]
        """The path, size in bytes, device and inode of the arena."""
        self.path = Path(self.segment["path"])
        self.is_same_host = hello["host"] == default_host_id()

    def allocate(self, sizes: Sequence[int], scope: str | None, deadline: float) -> list[int]:
        """Wait for slabs of these sizes in bytes until `deadline`, and return their offsets in the arena. The slabs
        belong to this stream until they are sealed."""
        left_s = max(0.01, deadline - time.monotonic())
        reply = self._ask({"allocate": list(sizes), "timeout_s": left_s, "scope": scope}, deadline)
        offsets = [int(place["offset"]) for place in reply["places"]]
        if any(not 0 <= at <= self.segment["nbytes"] - nbytes for at, nbytes in zip(offsets, sizes, strict=True)):
            raise NodeUnavailableError(f"{self._uri} gave a slab outside of its arena: it is not a data-plane node")
        return offsets

    def seal(self, bodies: Sequence[Mapping[str, Any]], deadline: float) -> list[Ref]:
        """Make objects of the written slabs, one body for each, and return their refs."""
        reply = self._ask({"seal": [dict(body) for body in bodies]}, deadline)
        return [Ref.from_dict(ref) for ref in reply["refs"]]

    def _ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return the node's reply. Raises the error that the node replies; closes the stream if it
        breaks.

        The call waits for the reply until `deadline` (seconds of `time.monotonic`).
        """
        self.tell(request)
        reply = self._read(deadline)
        error = from_body(reply)
        if error is not None:
            raise error
        return reply

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no reply. If the message is wrong, the node says so in its reply to the next
        request."""
        try:
            self._writer.write_metadata(pa.py_buffer(dump(message)))
        except pa.ArrowException:
            self.close()
            raise

    def close(self) -> None:
        """End the stream; the node frees its unsealed slabs."""
        if self.is_open:
            self.is_open = False
            close_quietly(self._writer)

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next reply. At the deadline the stream is cancelled, and the node frees the slabs of the
        stream."""
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


def close_quietly(writer: Any) -> None:
    """Close a stream that may already be broken; log the error instead of raising it."""
    try:
        writer.close()
    except (pa.ArrowException, OSError) as error:
        log.debug("a stream was already broken when it was closed: %s", error)
