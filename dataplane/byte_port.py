"""The port at which a node sends objects to other nodes: Flight for control, bytes out of band.

gRPC copies what it receives, and so would we, into the arena; from a connection of its own a receiver takes bytes
straight into their place (the idea of Arrow's Dissociated IPC protocol). Whoever may read gets a key over Flight, shows
it once as the first thing on a connection, and then sends requests as `byte_answers.py` describes them, one after the
other. In the clear: a node with a certificate has no such port.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from dataplane.byte_answers import answer
from dataplane.byte_socket import STALL_S, ByteSocket
from dataplane.call_limits import BODIES, Slots
from dataplane.errors import BadRequestError, DataPlaneError, OverloadedError, StreamLostError
from dataplane.security import Caller
from dataplane.wire import MAX_BODY_BYTES

if TYPE_CHECKING:
    from dataplane.node import Node

VERB = "get_bytes"
"""As which requests are counted."""
KEY_BYTES = 32
KEY_S = 10.0
"""A key is worth nothing after this time."""
SHOW_S = 5.0
"""Whoever connects shows a key within this time."""
IDLE_S = 300.0
"""A connection without a request for this long is closed."""
REQUEST_S = 20.0
"""A request that began comes whole in this time."""
CLOSE_S = 3.0
MAX_KEYS = 1024
MAX_STRANGERS = 32
"""Connections that have shown no key yet."""
MAX_CONNECTIONS = 64

log = logging.getLogger(__name__)


class Keys:
    """Keys that were given out and not shown yet, each with the caller it was given to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, tuple[float, Caller]] = {}

    def give(self, caller: Caller) -> str:
        """A new key, in hex. OverloadedError if too many were asked for at once."""
        now = time.monotonic()
        with self._lock:
            while self._keys and next(iter(self._keys.values()))[0] < now:
                del self._keys[next(iter(self._keys))]  # they expire in their order
            if len(self._keys) >= MAX_KEYS:
                raise OverloadedError(
                    f"{MAX_KEYS} keys for byte connections were asked for in {KEY_S:g} s and not used; try again later"
                )
            key = secrets.token_bytes(KEY_BYTES)
            self._keys[key] = (now + KEY_S, caller)
            return key.hex()

    def take(self, key: bytes) -> Caller | None:
        """Whom a key was given to, once and in time; else None."""
        with self._lock:
            until, caller = self._keys.pop(key, (0.0, None))
        return caller if time.monotonic() < until else None


class BytePort:
    """Listens and answers from threads of its own, one for each connection, from construction until `close`."""

    def __init__(self, host: str, port: int, flight_port: int, node: "Node") -> None:
        self._node = node
        self._keys = Keys()
        self._strangers = Slots(MAX_STRANGERS, "byte connections without a key", "patience")
        self._connections = Slots(MAX_CONNECTIONS, "byte connections", "patience")
        self._lock = threading.Lock()
        self._open: dict[ByteSocket, threading.Thread] = {}
        self._is_closed = False
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = _listen((str(address[0]), port), family, flight_port)
        except OSError as error:
            raise BadRequestError(
                f"--peer-port {port} on {host} cannot be used ({error}); choose another, 0 takes any"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="byte-port", daemon=True)
        self._thread.start()

    def offer(self, caller: Caller) -> dict[str, Any]:
        """What the action `bytes` answers: the port, and a key to show there once, soon."""
        return {"port": self.port, "key": self._keys.give(caller)}

    def close(self) -> None:
        """Stop listening and end every connection. Waits for: their threads, `CLOSE_S` for all."""
        until = time.monotonic() + CLOSE_S
        with self._lock:
            self._is_closed = True
            ending = dict(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for line in ending:
            line.cut()
        for thread in (self._thread, *ending.values()):
            thread.join(max(0.0, until - time.monotonic()))

    # -- private: threads of its own -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a byte connection could not be accepted: %s", error)
                time.sleep(0.1)  # out of descriptors: others will be closed
                continue
            try:
                self._strangers.take()
            except OverloadedError as error:
                log.info("a byte connection from %s is refused: %s", address[0], error)
                connected.close()
                continue
            try:
                self._start(ByteSocket(connected, f"the node at {address[0]}", STALL_S))
            except (OSError, RuntimeError) as error:  # no thread to be had, or the other side is gone already
                log.warning("a byte connection could not be answered: %s", error)
                self._strangers.give_back()
                connected.close()

    def _start(self, line: ByteSocket) -> None:
        thread = threading.Thread(target=self._run, args=(line,), name="bytes", daemon=True)
        with self._lock:
            thread.start()  # it waits for the lock before it forgets itself
            self._open[line] = thread
            if self._is_closed:
                line.cut()

    def _run(self, line: ByteSocket) -> None:
        """A connection, from its key to its end."""
        try:
            try:
                caller = self._let_in(line)
            finally:
                self._strangers.give_back()
            if caller is None:
                return
            with self._connections.held(), self._node.meter.stream(VERB):
                line.send({"node": self._node.node_id})
                while self._answer_next(line, caller):
                    pass
        except DataPlaneError as error:
            log.info("a byte connection broke: %s", error)
        except Exception:
            if not self._is_closed:  # else what it waited for was called off
                log.exception("a byte connection failed")
        finally:
            with self._lock:
                del self._open[line]
            line.close()

    def _let_in(self, line: ByteSocket) -> Caller | None:
        shown = bytearray(KEY_BYTES)
        line.fill([memoryview(shown)], time.monotonic() + SHOW_S)
        caller = self._keys.take(bytes(shown))
        if caller is None:
            self._node.meter.count_error(VERB, "UnauthenticatedError")
        return caller

    def _answer_next(self, line: ByteSocket, caller: Caller) -> bool:
        """Answer a request; False after the last one, which may be one that could not be answered."""
        nbytes = line.length(time.monotonic() + IDLE_S, IDLE_S)
        if nbytes is None:
            return False
        try:
            with self._node.meter.call(VERB):
                caller.check_again()
                if nbytes > MAX_BODY_BYTES:
                    raise BadRequestError(f"a request of {nbytes} bytes; wanted at most {MAX_BODY_BYTES}")
                with BODIES.held(nbytes):
                    body = line.body(nbytes, "the request", time.monotonic() + REQUEST_S)
                    answer(self._node, body, line)
        except DataPlaneError as error:
            log.info("a request over a byte connection failed: %s", error)
            if not isinstance(error, StreamLostError):
                line.send({"error": type(error).__name__, "message": str(error)})
            return False
        return True


def _listen(address: tuple[str, int], family: socket.AddressFamily, taken: int) -> socket.socket:
    """A listening socket; where any port will do, another than the one that the Flight server is about to take."""
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # as gRPC listens
    first = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
    if address[1] or first.getsockname()[1] != taken:
        return first
    with first:
        return socket.create_server(address, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
