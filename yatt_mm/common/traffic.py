"""Counters of the bytes that this process moves over TCP, as the system counts them. Linux only.

Shared memory, pipes, Unix sockets and InfiniBand are not counted.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

INFO_BYTES = 208
"""The bytes of `struct tcp_info` (linux/tcp.h) up to the last value that is read, which kernels have since 4.19."""
_ACKED, _RECEIVED, _NOT_SENT, _SENT = 120, 128, 144, 200
"""The offsets of `tcpi_bytes_acked`, `tcpi_bytes_received`, `tcpi_notsent_bytes` and `tcpi_bytes_sent`."""


def sent_in(info: bytes) -> int:
    """Return the bytes that the process behind a connection has written, of its `tcp_info`."""
    (sent,), (waiting,) = struct.unpack_from("=Q", info, _SENT), struct.unpack_from("=I", info, _NOT_SENT)
    return int(sent + waiting)


class Traffic:
    """The count of the bytes that this process sent and received over TCP connections."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        """[name of a connection] Bytes until it was last looked at, while it was open."""
        self._closed_bytes = 0
        self._taken = 0

    def take_bytes(self) -> int:
        """Return the bytes sent and received since the last call; the first call counts from the start of the process.

        Bytes that a connection moved between `look_at` and its end are not counted.
        """
        are_open = {self.look_at(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()}
        for name in self._seen.keys() - are_open:
            self._closed_bytes += self._seen.pop(name)
        total = self._closed_bytes + sum(self._seen.values())
        self._taken, taken = total, total - self._taken
        return taken

    def look_at(self, descriptor: int) -> str | None:
        """Note what a connection has moved so far. Return its name, or None if the descriptor is not an open socket."""
        try:
            name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if not name.startswith("socket:"):
                return None
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_tcp = (
                    connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
                )
                moved = self.moved_by(connection) if is_tcp else 0
            self._seen[name] = max(self._seen.get(name, 0), moved)
        except OSError:  # the descriptor was closed in the meantime
            return None
        return name

    def moved_by(self, connection: socket.socket) -> int:
        """Return the bytes of a connection that count."""
        info = _info(connection)
        return sum(struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _RECEIVED))


class SentToHosts(Traffic):
    """The count of the bytes that this process sent to other hosts."""

    def moved_by(self, connection: socket.socket) -> int:
        """Return the bytes that a connection sent; 0 if its other end is on this host, where both ends have the same
        address."""
        try:
            is_near = connection.getpeername()[0] == connection.getsockname()[0]
        except OSError:  # it listens
            return 0
        return 0 if is_near else sent_in(_info(connection))


def _info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
