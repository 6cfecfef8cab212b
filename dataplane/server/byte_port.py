"""The byte port: it sends objects to other nodes over TCP, while Flight does the control.

gRPC copies what it receives, and the node would copy it again into the arena. From a separate connection a receiver
reads bytes straight into their slabs (the idea of Arrow's Dissociated IPC protocol). A client with the right to read
gets a key over Flight and shows it once at the beginning of a connection. Then it sends requests, one after the other,
as described in `byte_answers.py`. The connection is not encrypted: a node with a certificate has no byte port.
"""

import contextlib
import logging
import socket
import threading
import time

from dataplane.core.byte_socket import KEY_BYTES, STALL_S, ByteSocket
from dataplane.core.errors import BadRequestError, DataPlaneError, OverloadedError, StreamLostError
from dataplane.core.json_body import MAX_BODY_BYTES
from dataplane.server.auth import Caller
from dataplane.server.byte_answers import answer
from dataplane.server.byte_keys import ByteKeys
from dataplane.server.call_limits import BODIES, Slots
from dataplane.server.services import Services

VERB = "get_bytes"
"""The verb under which requests are counted."""
SHOW_S = 5.0
"""The time in seconds within which a client must show its key."""
IDLE_S = 300.0
"""The time in seconds after which a connection without a request is closed."""
REQUEST_S = 20.0
"""The time in seconds from the first byte of a request to its last."""
CLOSE_S = 3.0
MAX_UNPROVEN = 32
"""The maximum number of connections that have shown no key yet."""
MAX_CONNECTIONS = 64

log = logging.getLogger(__name__)


class BytePort:
    """Answers requests in its own threads, one per connection, from construction until `close`."""

    def __init__(self, listener: socket.socket, keys: ByteKeys, services: Services) -> None:
        self._services = services
        self._keys = keys
        self._unproven = Slots(MAX_UNPROVEN, "byte connections without a key")
        self._connections = Slots(MAX_CONNECTIONS, "byte connections")
        self._lock = threading.Lock()
        self._open: dict[ByteSocket, threading.Thread] = {}
        self._is_closed = False
        self._listener = listener
        self._thread = threading.Thread(target=self._accept, name="byte-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection. Waits for: their threads, `CLOSE_S` for all."""
        until = time.monotonic() + CLOSE_S
        with self._lock:
            self._is_closed = True
            ending = dict(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # this wakes the thread that accepts
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
                time.sleep(0.1)  # no file descriptor is left; other connections will close
                continue
            try:
                self._unproven.take()
            except OverloadedError as error:
                log.info("a byte connection from %s is refused: %s", address[0], error)
                connected.close()
                continue
            try:
                self._start(ByteSocket(connected, f"the node at {address[0]}", STALL_S))
            except (OSError, RuntimeError) as error:  # no thread can be started, or the client is gone already
                log.warning("a byte connection could not be answered: %s", error)
                self._unproven.give_back()
                connected.close()

    def _start(self, line: ByteSocket) -> None:
        thread = threading.Thread(target=self._run, args=(line,), name="bytes", daemon=True)
        with self._lock:
            thread.start()  # the thread waits for the lock before it removes itself
            self._open[line] = thread
            if self._is_closed:
                line.cut()

    def _run(self, line: ByteSocket) -> None:
        """Serve one connection, from its key to its end."""
        try:
            try:
                caller = self._let_in(line)
            finally:
                self._unproven.give_back()
            if caller is None:
                return
            with self._connections.held(), self._services.meter.stream(VERB):
                line.send({"node": self._services.node_id})
                while self._answer_next(line, caller):
                    pass
        except DataPlaneError as error:
            log.info("a byte connection broke: %s", error)
        except Exception:
            if not self._is_closed:  # otherwise its wait was cancelled
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
            self._services.meter.count_error(VERB, "UnauthenticatedError")
        return caller

    def _answer_next(self, line: ByteSocket, caller: Caller) -> bool:
        """Answer one request. Return False after the last one, which may be a request that could not be answered."""
        nbytes = line.length(time.monotonic() + IDLE_S, IDLE_S)
        if nbytes is None:
            return False
        try:
            with self._services.meter.call(VERB):
                caller.check_again()
                if nbytes > MAX_BODY_BYTES:
                    raise BadRequestError(f"a request of {nbytes} bytes; wanted at most {MAX_BODY_BYTES}")
                with BODIES.held(nbytes):
                    body = line.body(nbytes, "the request", time.monotonic() + REQUEST_S)
                    answer(self._services, body, line)
        except DataPlaneError as error:
            log.info("a request over a byte connection failed: %s", error)
            if not isinstance(error, StreamLostError):
                line.send({"error": type(error).__name__, "message": str(error)})
            return False
        return True


def listen(host: str, port: int, flight_port: int) -> socket.socket:
    """Return a listening socket. With port 0 it gets a free port other than the one that Flight is about to take.

    Raises:
        BadRequestError: the port is taken, or the host is not of this machine.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address = (str(resolved[0]), port)
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # gRPC listens in the same way
        first = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
        if port or first.getsockname()[1] != flight_port:
            return first
        with first:
            return socket.create_server(address, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_dual)
    except OSError as error:
        raise BadRequestError(
            f"--peer-port {port} on {host} cannot be used ({error}); choose another, 0 takes any"
        ) from error
