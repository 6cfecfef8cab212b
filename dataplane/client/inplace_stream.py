"""The stream with which a client on the node's machine allocates slabs in the arena and seals what it wrote there.

`inplace_put.py` and `writer.py` use it.
"""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import GRACE_S
from dataplane.core.errors import StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.hosts import default_host_id
from dataplane.core.json_body import dump, parse
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

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
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
        """Send a message that has no reply. The node returns the error of a wrong message with the next request."""
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
