"""A writer's stream to a node on its machine: asks for places in the arena, and has what was written sealed."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import GRACE_S
from dataplane.core.block_timeouts import BLOCK_TIMEOUTS
from dataplane.core.errors import StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.hosts import default_host_id
from dataplane.core.json_body import dump, parse

log = logging.getLogger(__name__)


class InplaceStream:
    """One DoExchange `put`, for one thread at a time. Places that are not sealed go back when it closes."""

    def __init__(self, flight: fl.FlightClient, uri: str, deadline: float) -> None:
        self._uri = uri
        self.is_open = True
        self._writer, self._reader = flight.do_exchange(fl.FlightDescriptor.for_command(dump({"verb": "put"})))
        hello = self._read(deadline)
        self.segment: Mapping[str, Any] = hello["segments"][0]
        """Path and size of the arena."""
        self.path = Path(self.segment["path"])
        self.is_same_host = hello["host"] == default_host_id()

    def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request, wait for its answer; raises the node's error. A broken stream is closed."""
        self.tell(request)
        answer = self._read(deadline)
        error = from_body(answer)
        if error is not None:
            raise error
        return answer

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send what has no answer; what is wrong with it is the answer to the next request."""
        try:
            self._writer.write_metadata(pa.py_buffer(dump(message)))
        except pa.ArrowException:
            self.close()
            raise

    def close(self) -> None:
        """End the stream, and with it its places."""
        if self.is_open:
            self.is_open = False
            close_quietly(self._writer)

    def _read(self, deadline: float) -> dict[str, Any]:
        """The next answer; a stream that takes too long is cut, and with it the places it held."""
        is_overdue = threading.Event()

        def cut() -> None:
            is_overdue.set()
            self._reader.cancel()

        try:
            with BLOCK_TIMEOUTS.cut(max(deadline, time.monotonic()) + GRACE_S, cut):
                chunk = self._reader.read_chunk()
            return parse(chunk.app_metadata, "the answer to put")
        except pa.ArrowException as error:
            self.close()
            raise fl.FlightTimedOutError("no answer") if is_overdue.is_set() else error from error
        except StopIteration:
            self.close()
            raise StreamLostError(
                f"{self._uri} ended the stream in the middle of a put; is the node running?"
            ) from None


def close_quietly(writer: Any) -> None:
    """Close a stream that may be broken already."""
    try:
        writer.close()
    except (pa.ArrowException, OSError) as error:
        log.debug("a stream was broken when it was closed: %s", error)
