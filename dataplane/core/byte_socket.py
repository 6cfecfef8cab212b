"""A TCP connection that carries JSON headers and raw bytes: all of what was asked for, or an error by a deadline.

Bytes go from and to the memory that the caller names, in as few system calls as there can be: the kernel waits, with
timeouts of its own, so that no Python runs between the parts of an object. Whatever ends the connection is a
StreamLostError; after one it is worth nothing any more.
"""

import contextlib
import math
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.core.errors import StreamLostError
from dataplane.core.json_body import dump, parse

KEY_BYTES = 32
"""The length of the key that a receiver shows first on a byte connection."""
STALL_S = 20.0
"""A connection on which nothing comes, or nothing goes, for this long is cut."""
_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("@ll")
_MAX_PARTS = 512
"""Of one system call; Linux takes 1,024."""
_SCRATCH_BYTES = 256 << 10


class ByteSocket:
    """One thread at a time uses it; `cut` may be called by any."""

    def __init__(self, connected: socket.socket, what: str, stall_s: float = STALL_S) -> None:
        """`what` names the other side in errors; `connected` is closed with this object."""
        self._socket = connected
        self._what = what
        self._stall_s = stall_s
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(stall_s))

    def send(self, header: Mapping[str, Any], parts: Sequence[memoryview] = (), until: float = math.inf) -> None:
        """A header and the bytes that it describes.

        Waits for: the other side to take them, `stall_s` for any of it, and until `until` for all.
        """
        body = dump(header)
        self.send_raw([memoryview(_LENGTH.pack(len(body)) + body), *parts], until)

    def send_raw(self, parts: Sequence[memoryview], until: float = math.inf) -> None:
        """Bytes as they are."""
        rest = [part for part in parts if part.nbytes]
        while rest:
            try:
                if until < math.inf:
                    self._set_timeout(until, option=socket.SO_SNDTIMEO)
                count = self._socket.sendmsg(rest[:_MAX_PARTS])
            except OSError as error:
                raise self._lost("took nothing", error) from error
            rest = _without(rest, count)

    def length(self, until: float, stall_s: float | None = None) -> int | None:
        """The length of the next header; None if the connection ends here, or nothing comes in time."""
        raw = bytearray(_LENGTH.size)
        first = memoryview(raw)[:1]
        try:
            self._set_timeout(until, stall_s)
            if not self._socket.recv_into(first):
                return None
        except OSError:
            return None
        self.fill([memoryview(raw)[1:]], until)
        return int(_LENGTH.unpack(raw)[0])

    def body(self, nbytes: int, what: str, until: float) -> dict[str, Any]:
        """The JSON of a header of this length, which the caller has found bearable. BadRequestError if it is none."""
        raw = bytearray(nbytes)
        self.fill([memoryview(raw)], until)
        return parse(bytes(raw), what)

    def fill(self, parts: Sequence[memoryview], until: float) -> None:
        """Receive as many bytes as the parts take, in order. Waits `stall_s` for any, until `until` for all."""
        rest = [part for part in parts if part.nbytes]
        while rest:
            try:
                self._set_timeout(until)
                count = self._socket.recvmsg_into(rest[:_MAX_PARTS], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise self._lost("sent nothing", error) from error
            if not count:
                raise StreamLostError(f"{self._what} closed the connection in the middle")
            rest = _without(rest, count)

    def drain(self, nbytes: int, until: float) -> None:
        """Receive bytes that nobody wants."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[:nbytes]
            self.fill([part], until)
            nbytes -= len(part)

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and nothing came that nobody asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """End it, also for a thread that waits in it just now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and give its descriptor back: only when no other thread is in it."""
        self.cut()
        self._socket.close()

    def _set_timeout(self, until: float, stall_s: float | None = None, option: int = socket.SO_RCVTIMEO) -> None:
        left_s = min(self._stall_s if stall_s is None else stall_s, until - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the time is over")
        self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(left_s))

    def _lost(self, what: str, error: OSError) -> StreamLostError:
        if isinstance(error, BlockingIOError):
            return StreamLostError(f"{self._what} {what} for too long (at most {self._stall_s:g} s, and the call's)")
        return StreamLostError(f"the connection to {self._what} broke ({error})")


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    for at, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[at + 1 :]]
        count -= part.nbytes
    return []


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it; 0 would mean for ever."""
    micros = min(max(1000, math.ceil(min(seconds, 1e6) * 1e6)), 10**12)
    return _TIME.pack(micros // 10**6, micros % 10**6)
