"""A TCP connection for JSON headers and raw bytes. A call moves all of its bytes, or raises an error by a deadline.

Bytes are sent from and received into the caller's memory, with as few system calls as possible: the kernel waits, with
its own timeouts, so no Python runs between the parts of an object. If the connection ends for any reason, the call
raises StreamLostError, and the connection cannot be used again. A deadline `until` is in seconds of `time.monotonic`.
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
"""The size in bytes of the key that a receiver sends first on a byte connection."""
STALL_S = 20.0
"""The seconds after which a call gives up a connection on which no byte moves."""
_LENGTH = struct.Struct("!I")
"""The format of the length in bytes that is sent before each header."""
_TIME = struct.Struct("@ll")
"""The format of the kernel's `struct timeval`: seconds and microseconds."""
_MAX_PARTS = 512
"""The maximum number of buffers in one system call; Linux allows 1,024."""
_SCRATCH_BYTES = 256 << 10


class ByteSocket:
    """A connected TCP socket that sends and receives headers and bytes.

    One thread at a time may use it; `cut` may be called from any thread.
    """

    def __init__(self, connected: socket.socket, what: str, stall_s: float = STALL_S) -> None:
        """Take over a connected socket. `what` names the other side in errors; `close` also closes `connected`."""
        self._socket = connected
        self._what = what
        self._stall_s = stall_s
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(stall_s))

    def send(self, header: Mapping[str, Any], parts: Sequence[memoryview] = (), until: float = math.inf) -> None:
        """Send a header and the bytes that it describes.

        The call waits until the other side has accepted all bytes: at most `stall_s` for the next byte, and until
        `until` for all bytes.
        """
        body = dump(header)
        self.send_raw([memoryview(_LENGTH.pack(len(body)) + body), *parts], until)

    def send_raw(self, parts: Sequence[memoryview], until: float = math.inf) -> None:
        """Send the bytes of all parts, in order, without a header."""
        rest = [part for part in parts if part.nbytes]
        while rest:
            try:
                if until < math.inf:
                    self._set_timeout(until, option=socket.SO_SNDTIMEO)
                count = self._socket.sendmsg(rest[:_MAX_PARTS])
            except OSError as error:
                raise self._lost("accepted no bytes", error) from error
            rest = _without(rest, count)

    def length(self, until: float, stall_s: float | None = None) -> int | None:
        """Receive the length in bytes of the next header. Return None if the connection ends here or no byte comes in
        time."""
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
        """Receive a header of `nbytes` bytes and return its JSON object. Raises BadRequestError if the header is not
        JSON.

        The caller must have checked that the length is acceptable.
        """
        raw = bytearray(nbytes)
        self.fill([memoryview(raw)], until)
        return parse(bytes(raw), what)

    def fill(self, parts: Sequence[memoryview], until: float) -> None:
        """Receive bytes until all parts are full, in order.

        The call waits at most `stall_s` for the next byte from the other side, and until `until` for all bytes.
        """
        rest = [part for part in parts if part.nbytes]
        while rest:
            try:
                self._set_timeout(until)
                count = self._socket.recvmsg_into(rest[:_MAX_PARTS], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise self._lost("sent no bytes", error) from error
            if not count:
                raise StreamLostError(f"{self._what} closed the connection in the middle")
            rest = _without(rest, count)

    def drain(self, nbytes: int, until: float) -> None:
        """Receive `nbytes` bytes and drop them."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[:nbytes]
            self.fill([part], until)
            nbytes -= len(part)

    @property
    def is_quiet(self) -> bool:
        """True if the connection is open and no unread bytes have arrived."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """Shut the connection down; a thread that waits in a call of this object gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close its descriptor. Call this only when no other thread uses the socket."""
        self.cut()
        self._socket.close()

    def _set_timeout(self, until: float, stall_s: float | None = None, option: int = socket.SO_RCVTIMEO) -> None:
        """Set the kernel's timeout of the next call. Raises TimeoutError if `until` has passed."""
        left_s = min(self._stall_s if stall_s is None else stall_s, until - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(left_s))

    def _lost(self, what: str, error: OSError) -> StreamLostError:
        """Return the StreamLostError for an error of the socket; `what` says what the other side did not do."""
        if isinstance(error, BlockingIOError):
            return StreamLostError(
                f"{self._what} {what} for too long (at most {self._stall_s:g} s, and until the call's deadline)"
            )
        return StreamLostError(f"the connection to {self._what} broke ({error})")


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return the parts that remain after the first `count` bytes."""
    for at, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[at + 1 :]]
        count -= part.nbytes
    return []


def _timeval(seconds: float) -> bytes:
    """Return a timeout as the kernel's `struct timeval`: at least 1 ms, because 0 would mean no timeout."""
    micros = min(max(1000, math.ceil(min(seconds, 1e6) * 1e6)), 10**12)
    return _TIME.pack(micros // 10**6, micros % 10**6)
