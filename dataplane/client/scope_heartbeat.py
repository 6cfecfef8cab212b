"""The client's side of scopes: a stream that shows the node that this process is there; it comes back if it broke.

It is opened with the first scope that is not kept. When the node restarts, the scopes are opened again: objects that
the node kept on disk are in them, others are gone.
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

from dataplane.client.inplace_stream import close_quietly
from dataplane.client.retry import MIN_ATTEMPT_S
from dataplane.core.errors import BadRequestError, DataPlaneError, NodeUnavailableError
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import dump, parse

_CLOSE_S = 2.0
_RETRY_S = 0.5
_CONNECT_S = 5.0

log = logging.getLogger(__name__)


class ScopeHeartbeat:
    """Keeps scopes open for as long as its client lives. Thread-safe."""

    def __init__(self, flight: fl.FlightClient, uri: str, act: Callable[[str, Mapping[str, Any]], object]) -> None:
        """`act` runs an action of the node. It must not keep the client alive."""
        self._flight = flight
        self._uri = uri
        self._act = act
        self._owner = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._bound: dict[str, Mapping[str, Any]] = {}
        self._stream: tuple[Any, Any] | None = None
        self._is_there = threading.Event()
        """The stream is open, and with it the scopes; or nothing was ever opened."""
        self._is_there.set()
        self._is_closed = threading.Event()

    def __del__(self) -> None:
        self._is_closed.set()
        if self._stream is not None:
            self._stream[1].cancel()

    def open(self, body: Mapping[str, Any], timeout_s: float) -> None:
        """Open a scope that closes when this process is gone. Raises ArrowException if there is no node."""
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
        """Before a call that needs scopes: the seconds left. Waits for: the stream to be open again, if it broke."""
        started = time.monotonic()
        self._is_there.wait(timeout_s)
        return max(MIN_ATTEMPT_S, started + timeout_s - time.monotonic())

    def forget(self, name: str) -> bool:
        """The scope is closed: it is not opened again. Whether it was kept open here."""
        with self._lock:
            return self._bound.pop(name, None) is not None

    def close(self) -> None:
        """The client is done: its scopes close now."""
        self._is_closed.set()
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream[0].write_metadata(pa.py_buffer(dump({"end": True})))
            except pa.ArrowException as error:
                log.info("%s was gone before its scopes were closed: %s", self._uri, str(error)[:100])
            self._watcher.join(_CLOSE_S)  # gRPC aborts a process that ends a stream from two threads at once
            if self._watcher.is_alive():
                stream[1].cancel()
                self._watcher.join(_CLOSE_S)
            close_quietly(stream[0])

    def _connect(self, timeout_s: float) -> tuple[Any, Any]:
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "scopes", "owner": self._owner}))
        writer, reader = self._flight.do_exchange(descriptor)
        timer = threading.Timer(timeout_s, reader.cancel)
        timer.daemon = True
        timer.start()
        try:
            parse(reader.read_chunk().app_metadata, "the answer to scopes")
        except StopIteration as error:
            raise fl.FlightUnavailableError("the node ended the stream at once") from error
        finally:
            timer.cancel()
        return writer, reader

    def lost(self) -> threading.Event:
        """The stream broke; what is returned is set once nobody wants another."""
        self._is_there.clear()
        return self._is_closed

    def come_back(self) -> Any:
        """The reader of a new stream with the scopes open again; None if the node is not there yet, or not whole."""
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
        with self._lock:
            bound = list(self._bound.values())
        for body in bound:
            try:
                self._act("open_scope", body)
            except BadRequestError as error:  # somebody else opened it otherwise meanwhile: it is theirs now
                log.warning("scope %s is not opened again: %s", body["name"], error)
                self.forget(str(body["name"]))


def weak_method(method: Callable[[str, Mapping[str, Any]], object]) -> Callable[[str, Mapping[str, Any]], object]:
    """A bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(verb: str, body: Mapping[str, Any]) -> object:
        bound = reference()
        if bound is None:
            raise NodeUnavailableError("this client was dropped")
        return bound(verb, body)

    return call


def _watch(reference: "weakref.ref[ScopeHeartbeat]", reader: Any) -> None:
    """Waits for: the stream's end; then has the keeper come back, until it is closed or forgotten."""
    while True:
        try:
            reader.read_chunk()
            continue
        except (StopIteration, pa.ArrowException):
            keeper = reference()
        if keeper is None:
            return
        is_closed, reader = keeper.lost(), None
        while reader is None:
            del keeper  # whoever waits must not keep it alive
            if is_closed.wait(_RETRY_S):
                return
            keeper = reference()
            if keeper is None:
                return
            reader = keeper.come_back()
        del keeper
