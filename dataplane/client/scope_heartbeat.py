"""The heartbeat of a client's scopes: an open stream that shows the node that this process is still alive.

The stream is opened with the first scope. If the stream breaks, it is opened again.
When the node has restarted, the scopes are opened again too: they contain only the objects that the node kept on disk.
"""

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import MIN_ATTEMPT_S
from dataplane.client.session_stream import close_quietly
from dataplane.core.errors import BadRequestError, DataPlaneError, NodeUnavailableError
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import dump, parse
from dataplane.core.timers import TIMERS

_CLOSE_S = 2.0
"""The seconds that `close` waits for the watching thread."""
_RETRY_S = 0.5
"""The seconds between two attempts to open a broken stream again."""
_CONNECT_S = 5.0
"""The timeout of one of these attempts, in seconds."""

log = logging.getLogger(__name__)


class ScopeHeartbeat:
    """Keeps the scopes of a client open as long as the client lives. Thread-safe."""

    def __init__(self, flight: fl.FlightClient, uri: str, act: Callable[[str, Mapping[str, Any]], object]) -> None:
        """Make a heartbeat without scopes. `act` runs an action of the node, and must not keep the client alive."""
        self._flight = flight
        self._uri = uri
        self._act = act
        self._owner = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._bound: dict[str, Mapping[str, Any]] = {}
        """The request that opened each scope of this client, by the name of the scope."""
        self._stream: tuple[Any, Any] | None = None
        self._is_there = threading.Event()
        """The event that is set while the stream and its scopes are open, and while no scope was ever opened."""
        self._is_there.set()
        self._is_closed = threading.Event()

    def __del__(self) -> None:
        self._is_closed.set()
        if self._stream is not None:
            self._stream[1].cancel()

    def open(self, body: Mapping[str, Any], timeout_s: float) -> None:
        """Open a scope that closes when this process is gone. Raises ArrowException if no node replies."""
        with self._lock:
            if self._stream is None:
                self._stream = self._connect(timeout_s)
                reference = weakref.ref(self)
                args = [reference, self._stream[1]]
                self._watcher = threading.Thread(target=_watch, args=args, name="scopes", daemon=True)
                self._watcher.start()
            bound = {**body, "owner": self._owner}
            self._act("open_scope", bound)
            self._bound[str(body["name"])] = bound

    def wait(self, timeout_s: float) -> float:
        """Wait until the scopes are open, and return the seconds that are left. Calls that use a scope call this first.

        If the stream broke, the call waits at most `timeout_s` until it is open again.
        """
        started = time.monotonic()
        self._is_there.wait(timeout_s)
        return max(MIN_ATTEMPT_S, started + timeout_s - time.monotonic())

    def forget(self, name: str) -> bool:
        """Forget a scope, so that it is not opened again. Return whether this client kept it
        open."""
        with self._lock:
            return self._bound.pop(name, None) is not None

    def close(self) -> None:
        """Close the scopes of this client, and stop the heartbeat."""
        self._is_closed.set()
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream[0].write_metadata(pa.py_buffer(dump({"end": True})))
            except pa.ArrowException as error:
                log.info("the node at %s was gone before its scopes were closed: %s", self._uri, str(error)[:100])
            self._watcher.join(_CLOSE_S)  # gRPC aborts a process that ends a stream from two threads at once
            if self._watcher.is_alive():
                stream[1].cancel()
                self._watcher.join(_CLOSE_S)
            close_quietly(stream[0])

    def _connect(self, timeout_s: float) -> tuple[Any, Any]:
        """Open the stream; return its Flight writer and Flight reader."""
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "scopes", "owner": self._owner}))
        writer, reader = self._flight.do_exchange(descriptor)
        try:
            with TIMERS.limit(time.monotonic() + timeout_s, reader.cancel):
                parse(reader.read_chunk().app_metadata, "the reply to scopes")
        except StopIteration as error:
            raise fl.FlightUnavailableError("the node ended the stream at once") from error
        return writer, reader

    def mark_lost(self) -> threading.Event:
        """Note that the stream broke. Return the event that is set when this heartbeat is closed."""
        self._is_there.clear()
        return self._is_closed

    def reconnect(self) -> Any:
        """Open a new stream, open the scopes again, and return the reader of the new stream.

        Returns None if the node is not back yet, if a scope could not be opened, or if this heartbeat is closed.
        """
        stream = None
        try:
            stream = self._connect(_CONNECT_S)
            self._open_again()
            with self._lock:
                if not self._is_closed.is_set():
                    self._stream = stream
                    self._is_there.set()
                    return stream[1]
        except pa.ArrowException as error:
            log.debug("%s", from_flight(error, self._uri, "scopes", _CONNECT_S))
        except DataPlaneError as error:
            log.info("a scope could not be opened again: %s", error)
        if stream is not None:
            stream[1].cancel()
            close_quietly(stream[0])
        return None

    def _open_again(self) -> None:
        """Open all scopes of this client at the restarted node."""
        with self._lock:
            bound = list(self._bound.values())
        for body in bound:
            try:
                self._act("open_scope", body)
            except BadRequestError as error:  # another client opened it with other options: it owns the scope now
                log.warning("scope %s is not opened again: %s", body["name"], error)
                self.forget(str(body["name"]))


def weak_method(method: Callable[[str, Mapping[str, Any]], object]) -> Callable[[str, Mapping[str, Any]], object]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(verb: str, body: Mapping[str, Any]) -> object:
        bound = reference()
        if bound is None:
            raise NodeUnavailableError("this client was dropped")
        return bound(verb, body)

    return call


def _watch(reference: "weakref.ref[ScopeHeartbeat]", reader: Any) -> None:
    """Reopen the stream each time it breaks, until the heartbeat is closed or garbage-collected.

    This runs in its own thread, waits for the end of the stream, and holds only a weak reference while it waits.
    """
    while True:
        try:
            reader.read_chunk()
            continue
        except (StopIteration, pa.ArrowException):
            heartbeat = reference()
        if heartbeat is None:
            return
        is_closed, reader = heartbeat.mark_lost(), None
        while reader is None:
            del heartbeat  # a waiting thread must not keep the object alive
            if is_closed.wait(_RETRY_S):
                return
            heartbeat = reference()
            if heartbeat is None:
                return
            reader = heartbeat.reconnect()
        del heartbeat
