"""Counts what this host sends to the other hosts of a run, by the kernel's list of TCP connections (sock_diag(7))."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from yatt_mm.common.traffic import INFO_BYTES, sent_in

LOOK_S = 1.0
"""The seconds between two looks. What a connection sends between the last one and its end is not counted."""
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_TCP_INFO = 2
_ANY_STATE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
"""`struct nlmsghdr`: length, type, flags, sequence, port."""
_QUERY = struct.Struct("=BBBxI48x")
"""`struct inet_diag_req_v2`: family, protocol, what else is wanted, states; then a socket's id, which is not used."""
_PEER, _COOKIE, _ATTRIBUTES = 24, 44, 72
"""The offsets in `struct inet_diag_msg` of the other end's address, of the connection's number, and its length."""


class HostTraffic:
    """The count of the bytes that all processes of this host sent to some others, since it was made."""

    def __init__(self, others: Sequence[str]) -> None:
        """`others`: the addresses of the other hosts. Raises OSError if the kernel has no list of connections."""
        self._others = frozenset(ip_address(other).packed for other in others)
        self._lock = threading.Lock()
        self._seen = dict(_sent_by_connection(self._others))
        """[connection] the bytes that it had sent when it was last looked at; those that have ended stay."""
        self._untaken = 0
        threading.Thread(target=self._keep_looking, daemon=True, name="host's traffic").start()

    def take_bytes(self) -> int:
        """Return the bytes that were sent since the last call."""
        with self._lock:
            self._look()
            taken, self._untaken = self._untaken, 0
            return taken

    def _keep_looking(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = dict(_sent_by_connection(self._others))
        self._untaken += sum(sent - self._seen.get(connection, 0) for connection, sent in now.items())
        self._seen |= now


def _sent_by_connection(others: frozenset[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield the number of each connection of this host with others, and the bytes that it has sent."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in _dump(family):
            peer = message[_PEER : _PEER + (4 if message[0] == socket.AF_INET else 16)]
            if peer[:12] == bytes(10) + b"\xff\xff":  # a socket of IPv6 that speaks IPv4
                peer = peer[12:]
            info = _attribute(message, _TCP_INFO)
            if peer in others and len(info) >= INFO_BYTES:
                yield message[_COOKIE : _COOKIE + 8], sent_in(info)


def _dump(family: int) -> Iterator[bytes]:
    """Yield what the kernel says of each TCP connection of this host."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        query = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), _ANY_STATE)
        kernel.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + query)
        while True:
            data, at = kernel.recv(1 << 20), 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError(
                        -struct.unpack_from("=i", data, at + _HEADER.size)[0], "the kernel lists no connections"
                    )
                yield data[at + _HEADER.size : at + length]
                at += _aligned(length)


def _attribute(message: bytes, wanted: int) -> bytes:
    """Return the value of an attribute of a message; empty if it has none."""
    at = _ATTRIBUTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == wanted:
            return message[at + 4 : at + length]
        at += _aligned(length)
    return b""


def _aligned(length: int) -> int:
    return (length + 3) & ~3
