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
        """[connection that was open when last looked at] bytes until then."""
        self._closed_bytes = 0
        self._taken = 0

    def take_bytes(self) -> int:
        """Sent and received since the call before, at first since the process began.

        What a connection that has closed moved after it was last looked at is lost.
        """
        are_open = {self.look_at(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()}
        for name in self._seen.keys() - are_open:
            self._closed_bytes += self._seen.pop(name)
        total = self._closed_bytes + sum(self._seen.values())
        self._taken, taken = total, total - self._taken
        return taken

    def look_at(self, descriptor: int) -> str | None:
        """Note what a connection has moved by now; its name, or None where the descriptor is no open socket."""
        try:
            name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if not name.startswith("socket:"):
                return None
            self._seen[name] = max(self._seen.get(name, 0), _moved_bytes(descriptor))
        except OSError:  # closed meanwhile
            return None
        return name


def _moved_bytes(descriptor: int) -> int:
    """Of one open socket; 0 for what is no TCP connection."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + _COUNTS.size)
    return sum(_COUNTS.unpack_from(info, _BYTES_ACKED))
