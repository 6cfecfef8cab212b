"""Byte connections to other nodes, kept open between requests. If the other node offers no byte port, or the connection
fails, the caller uses Flight."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import is_gone
from dataplane.core.byte_socket import KEY_BYTES, ByteSocket
from dataplane.core.errors import BadRequestError, DataPlaneError, StreamLostError
from dataplane.core.json_body import ONE_OBJECT_BYTES, parse, take

SCHEMES = ("grpc", "grpc+tcp")
"""The schemes of addresses whose bytes may cross the network without encryption."""
WITHOUT_S = 60.0
"""After a node offered no byte connection, it is not asked for one again for this time, in seconds."""
_CONNECT_S = 2.0

log = logging.getLogger(__name__)


class ByteConnections:
    """A pool of connections for each address. Thread-safe."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[ByteSocket]] = {}
        self._used: set[ByteSocket] = set()
        self._without: dict[str, float] = {}
        self._told: set[str] = set()
        self._is_closed = False

    @contextmanager
    def borrowed(self, uri: str, flight: fl.FlightClient, count: int, until: float) -> Iterator[Sequence[ByteSocket]]:
        """Lend up to `count` connections. An empty list means that the caller should use Flight. An error in the block
        closes the lent connections.

        The keys for new connections are requested over `flight`. Raises the error of Flight if the node does not answer
        there.
        """
        lines: list[ByteSocket] = []
        try:
            while len(lines) < count and (line := self._take(uri) or self._open(uri, flight, until)) is not None:
                lines.append(line)
            yield lines
        except BaseException:
            for line in lines:
                self._close(line)
            raise
        for line in lines:
            self._give_back(uri, line)

    def forget(self, uri: str) -> None:
        """Close the unused connections to an address."""
        with self._lock:
            lines = self._idle.pop(uri, [])
        for line in lines:
            line.close()

    def close(self) -> None:
        """Close all connections. Callers that use one get an error."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = [line for lines in self._idle.values() for line in lines], {}
            used = list(self._used)
        for line in idle:
            line.close()
        for line in used:
            line.cut()

    def _take(self, uri: str) -> ByteSocket | None:
        """Return an open connection that was used before, or None."""
        while True:
            with self._lock:
                lines = self._idle.get(uri)
                if not lines:
                    return None
                line = lines.pop()
                self._used.add(line)
            if line.is_quiet:
                return line
            self._close(line)

    def _open(self, uri: str, flight: fl.FlightClient, until: float) -> ByteSocket | None:
        """Open a new connection. Return None if the node gives none for now."""
        address = urlsplit(uri)
        if address.scheme not in SCHEMES or not address.hostname or time.monotonic() < self._without.get(uri, 0.0):
            return None
        offer = _ask(flight, min(self._stall_s, until - time.monotonic()))
        if offer is None:
            self._without[uri] = time.monotonic() + WITHOUT_S
            return None
        port, key = offer
        try:
            line = self._connect(address.hostname, port, key, until)
        except (OSError, DataPlaneError) as error:
            if time.monotonic() >= until:
                return None  # the caller's own time was too short
            self._without[uri] = time.monotonic() + WITHOUT_S
            tell = log.info if uri in self._told else log.warning
            self._told.add(uri)
            tell(
                "node at %s: its port %d for bytes cannot be used (%s); objects come over Flight, which is slower: let "
                "this node reach that port (--peer-port there says which)",
                *(uri, port, error),
            )
            return None
        return line

    def _connect(self, host: str, port: int, key: bytes, until: float) -> ByteSocket:
        """Connect, show the key, and return the connection when the node has accepted the key."""
        wait_s = max(0.05, min(_CONNECT_S, until - time.monotonic()))
        line = ByteSocket(socket.create_connection((host, port), wait_s), f"the node at {host}:{port}", self._stall_s)
        with self._lock:
            self._used.add(line)
            if self._is_closed:
                line.cut()
        try:
            line.send_raw([memoryview(key)])
            greeted_by = time.monotonic() + wait_s
            nbytes = line.length(greeted_by)
            if nbytes is None or nbytes > ONE_OBJECT_BYTES:
                raise StreamLostError(f"{host}:{port} did not take the key of its node")
            take(line.body(nbytes, "its greeting", greeted_by), "its greeting", "node", str)
        except BaseException:
            self._close(line)
            raise
        return line

    def _give_back(self, uri: str, line: ByteSocket) -> None:
        with self._lock:
            self._used.discard(line)
            if not self._is_closed:
                self._idle.setdefault(uri, []).append(line)
                return
        line.close()

    def _close(self, line: ByteSocket) -> None:
        with self._lock:
            self._used.discard(line)
        line.close()


def _ask(flight: fl.FlightClient, timeout_s: float) -> tuple[int, bytes] | None:
    """Ask a node for its byte port and a key. Return None if the node has no such port or does not know the action."""
    options = fl.FlightCallOptions(timeout=max(0.05, timeout_s))
    try:
        results = list(flight.do_action(fl.Action("bytes", b"{}"), options))
    except fl.FlightTimedOutError:
        raise
    except pa.ArrowException as error:
        if is_gone(error):
            raise
        log.info("no byte connection: %s", str(error)[:200])
        return None
    with contextlib.suppress(BadRequestError, ValueError):
        body = parse(results[0].body if results else None, "the answer to bytes", ONE_OBJECT_BYTES)
        if "port" in body:
            port, key = take(body, "bytes", "port", int), bytes.fromhex(take(body, "bytes", "key", str))
            return (port, key) if 0 < port < 1 << 16 and len(key) == KEY_BYTES else None
    return None
