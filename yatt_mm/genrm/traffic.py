"""A counter of the bytes that this process moved over TCP, as the system counts them. Linux only.

Shared memory, pipes and Unix sockets are not counted.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = 120
"""The offset in bytes of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h); `tcpi_bytes_received` follows it."""
_COUNTS = struct.Struct("@QQ")
"""The two counts: bytes that were acknowledged, bytes that were received."""


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
            self._seen[name] = max(self._seen.get(name, 0), _moved_bytes(descriptor))
        except OSError:  # the descriptor was closed in the meantime
            return None
        return name


def _moved_bytes(descriptor: int) -> int:
    """Return the bytes that an open socket sent and received; 0 if it is not a TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + _COUNTS.size)
    return sum(_COUNTS.unpack_from(info, _BYTES_ACKED))
