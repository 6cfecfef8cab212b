"""A TCP proxy on loopback that counts what it passes on and cuts connections: the wire between two hosts, to break."""

import contextlib
import json
import socket
import struct
import threading

import pyarrow.flight as fl

_BYTES_RECEIVED = 128
"""Where `tcpi_bytes_received` stands in the kernel's tcp_info."""


_HOST = "127.0.0.2"
"""Another address of loopback, where the node's port for bytes is free."""


class Proxy:
    """A TCP proxy that counts what it passes on, and cuts every connection after so many bytes.

    It stands before the node's port for bytes as well, unless `has_bytes` is false: then nothing listens there, as
    behind a firewall.
    """

    def __init__(self, uri: str, *, has_bytes: bool = True) -> None:
        port = int(uri.rsplit(":", 1)[1])
        listener = socket.create_server((_HOST, 0))
        self.uri = f"grpc://{_HOST}:{listener.getsockname()[1]}"
        self._listeners = {port: listener}
        if has_bytes:
            byte_port = _byte_port(uri)
            self._listeners[byte_port] = socket.create_server((_HOST, byte_port))
        self.num_bytes = 0
        self.num_cuts = 0
        self.cut_after: int | None = None
        self.is_refusing = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._to_target: set[socket.socket] = set()
        self._num_connections = 0
        self._ended_bytes = 0
        for target, one in self._listeners.items():
            threading.Thread(target=self._accept, args=(one, ("127.0.0.1", target)), daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._listeners.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            one.close()
        self.cut()

    @property
    def num_connections(self) -> int:
        """Connections to the target that were opened so far."""
        return self._num_connections

    def received_bytes(self) -> int:
        """What the target sent over every connection so far, as the kernel counted it."""
        with self._lock:
            return self._ended_bytes + sum(_received(one) for one in self._to_target)

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            sockets, self._open = self._open, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while True:
            try:
                theirs, _ = listener.accept()
            except OSError:
                return
            if self.is_refusing:
                theirs.close()
                continue
            ours = socket.create_connection(target)
            with self._lock:
                self._open |= {ours, theirs}
                self._to_target.add(ours)
                self._num_connections += 1
            threading.Thread(target=self._pass_on, args=(theirs, ours, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(ours, theirs, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                is_last = is_counted and self._count(len(data))
                try:
                    target.sendall(data)
                finally:
                    if is_last:
                        self.cut()
        except OSError:
            pass
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if is_counted:
            with self._lock:
                self._ended_bytes += _received(source)
                self._to_target.discard(source)

    def _count(self, nbytes: int) -> bool:
        """Count what is passed on next: who receives it may look at once. Whether to cut everything after it."""
        with self._lock:
            self.num_bytes += nbytes
            if self.cut_after is None or self.num_bytes < self.cut_after:
                return False
            self.cut_after = None
            self.num_cuts += 1
            return True


def _byte_port(uri: str) -> int:
    """Where a node sends bytes from, as it says itself."""
    with fl.FlightClient(uri) as flight:
        (result,) = flight.do_action(fl.Action("bytes", b"{}"))
    return int(json.loads(result.body.to_pybytes())["port"])


def _received(one: socket.socket) -> int:
    """Bytes that came in over a connection, as the kernel counted them."""
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])
