"""How many bytes this process moved over its TCP connections, as the kernel counts them. Linux only.

What two processes share in memory, or send through pipes and Unix sockets, is not in it.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h); `tcpi_bytes_received` follows it."""
_COUNTS = struct.Struct("@QQ")


class Traffic:
    """Bytes of requests and replies, both ways."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._taken = 0

    def take_bytes(self) -> int:
        """Sent and received since the call before, at first since the process began.

        What a connection that has closed moved since the call before is lost.
        """
        for entry in Path("/proc/self/fd").iterdir():
            try:
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    self._seen[name] = max(self._seen.get(name, 0), _moved_bytes(int(entry.name)))
            except OSError:  # closed meanwhile
                continue
        total = sum(self._seen.values())
        self._taken, taken = total, total - self._taken
        return taken


def _moved_bytes(descriptor: int) -> int:
    """Of one open socket; 0 for what is no TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + _COUNTS.size)
    return sum(_COUNTS.unpack_from(info, _BYTES_ACKED))
