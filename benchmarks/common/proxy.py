"""A TCP proxy on loopback that counts the bytes it forwards and breaks connections. It stands for the network between
two hosts."""

import contextlib
import socket
import struct
import threading

_BYTES_RECEIVED = 128
"""The offset of `tcpi_bytes_received` in the kernel's tcp_info."""


class Proxy:
    """A TCP proxy that counts the bytes it forwards, and breaks every connection after a given number of bytes."""

    def __init__(self, uri: str) -> None:
        host, port = uri.removeprefix("grpc://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0
        self.num_cuts = 0
        self.cut_after: int | None = None
        self.is_refusing = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._to_target: set[socket.socket] = set()
        self._num_connections = 0
        self._ended_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.cut()

    @property
    def num_connections(self) -> int:
        """The number of connections to the target that were opened so far."""
        return self._num_connections

    def received_bytes(self) -> int:
        """The number of bytes that the target sent over all connections so far, as the system counted them."""
        with self._lock:
            return self._ended_bytes + sum(_received(one) for one in self._to_target)

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            sockets, self._open = self._open, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing:
                theirs.close()
                continue
            ours = socket.create_connection(self._target)
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
        """Count bytes before they are forwarded, because the receiver may read the counter at once. Return True if all
        connections must break after them."""
        with self._lock:
            self.num_bytes += nbytes
            if self.cut_after is None or self.num_bytes < self.cut_after:
                return False
            self.cut_after = None
            self.num_cuts += 1
            return True


def _received(one: socket.socket) -> int:
    """Return the number of bytes that a connection received, as the operating system counted them."""
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])
