"""The stream over which a client and its node talk about a session: messages with one reply each."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import GRACE_S
from dataplane.core.errors import StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.json_body import dump, parse
from dataplane.core.timers import TIMERS

log = logging.getLogger(__name__)


class SessionStream:
    """An open DoExchange stream with the verb `session`, for one thread at a time."""

    def __init__(self, flight: fl.FlightClient, uri: str, body: Mapping[str, Any], timeout_s: float) -> None:
        """Open the stream with `body` in its descriptor, and wait at most `timeout_s` for the node's first message."""
        self._uri = uri
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "session", **body}))
        self._writer, self._reader = flight.do_exchange(descriptor)
        try:
            self.hello = self._read(timeout_s)
            """The first message of the node: its id, its incarnation, and where its memory is."""
        except BaseException:
            self.close()
            raise

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and return the node's reply. Raises the error that the node replies."""
        self._writer.write_metadata(pa.py_buffer(dump(message)))
        return self._read(timeout_s)

    def close(self) -> None:
        """End the stream, which may be broken."""
        self._reader.cancel()
        close_quietly(self._writer)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message of the node. After `timeout_s` the stream is cancelled."""
        is_overdue = threading.Event()

        def cut() -> None:
            is_overdue.set()
            self._reader.cancel()

        try:
            with TIMERS.limit(time.monotonic() + timeout_s + GRACE_S, cut):
                reply = parse(self._reader.read_chunk().app_metadata, "the reply to session")
        except pa.ArrowException as raised:
            raise fl.FlightTimedOutError("no reply") if is_overdue.is_set() else raised from raised
        except StopIteration:
            raise StreamLostError(f"{self._uri} ended the session's stream; is it a data-plane node?") from None
        error = from_body(reply)
        if error is not None:
            raise error
        return reply


def close_quietly(writer: Any) -> None:
    """Close a stream that may already be broken; log the error instead of raising it."""
    try:
        writer.close()
    except (pa.ArrowException, OSError) as error:
        log.debug("a stream was already broken when it was closed: %s", error)
