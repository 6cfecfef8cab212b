"""The frames between a node and a parser, over a socket pair: a kind, a head of JSON, and buffers of bytes.

A request may carry a descriptor of the file. Sizes are checked before anything is allocated for them.
"""

import enum
import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

MAX_HEAD_BYTES = 256 << 20
MAX_BUFFERS = 1 << 20
_PREFIX = struct.Struct("<BQI")
_PIECE_BYTES = 4 << 20
"""The most bytes of one system call, so that the time limit is looked at often enough."""
_AHEAD_BYTES = 64 << 10
"""Up to as many bytes are received at once, so that a small frame takes one system call."""
_SMALL_BYTES, _MAX_SMALL = 4 << 10, 16
"""A few buffers that are all small are sent in one system call."""


class Kind(enum.IntEnum):
    """What a frame says."""

    READY = 1
    """Parser: it has started."""
    REQUEST = 2
    """Node: do a task."""
    REPLY = 3
    """Parser: a part of the answer, and more follows."""
    LAST = 4
    """Parser: the last part of the answer."""
    END = 5
    """Parser: there is no answer, or no more of it."""
    ERROR = 6
    """Parser: the task has failed, and why."""
    READ = 7
    """Parser: read a range of the file for it."""
    BYTES = 8
    """Node: the bytes of that range."""
    UNREAD = 9
    """Node: why the range could not be read."""


class FrameError(Exception):
    """What came is no frame, or is larger than allowed."""


class OverdueError(Exception):
    """The frame did not come, or was not taken, in time."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: Kind
    head: bytes
    buffers: Sequence[bytes]
    fd: int | None = None
    """A descriptor that came with it. The receiver closes it."""


class FrameSocket:
    """One end of the stream of frames. One thread at a time may use it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""
        """What was received behind the last frame."""

    def send(
        self,
        kind: Kind,
        head: bytes = b"",
        buffers: Sequence[bytes | memoryview] = (),
        *,
        fd: int | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Send a frame, with a descriptor if there is one. Raises OverdueError after `timeout_s`."""
        until = time.monotonic() + timeout_s
        small = [data for data in buffers if len(data) <= _SMALL_BYTES] if len(buffers) <= _MAX_SMALL else []
        is_small = len(small) == len(buffers)
        sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
        first = b"".join([_PREFIX.pack(kind, len(head), len(buffers)), sizes, head, *(small if is_small else ())])
        self._limit(socket.SO_SNDTIMEO, until)
        try:
            done = socket.send_fds(self._socket, [first], [fd]) if fd is not None else self._socket.send(first)
            for data in (memoryview(first)[done:], *(() if is_small else buffers)):
                view = memoryview(data)
                while len(view):
                    self._limit(socket.SO_SNDTIMEO, until)
                    view = view[self._socket.send(view[:_PIECE_BYTES]) :]
        except BlockingIOError as error:
            raise OverdueError("a frame was not taken in time") from error

    def receive(self, max_bytes: int, timeout_s: float = math.inf, *, takes_descriptors: bool = False) -> Frame:
        """Return the next frame, without a descriptor unless `takes_descriptors`. Raises OverdueError after
        `timeout_s`, FrameError for a frame of more than `max_bytes` or none at all, and EOFError at the end of the
        stream."""
        until = time.monotonic() + timeout_s
        fd = self._receive_descriptor() if takes_descriptors and not self._rest else None
        kind, head_bytes, num_buffers = _PREFIX.unpack(self._exactly(_PREFIX.size, until))
        if head_bytes > MAX_HEAD_BYTES or num_buffers > MAX_BUFFERS:
            raise FrameError(f"a head of {head_bytes} bytes and {num_buffers} buffers")
        sizes = struct.unpack(f"<{num_buffers}Q", self._exactly(8 * num_buffers, until))
        if sum(sizes) > max_bytes:
            raise FrameError(f"{sum(sizes)} bytes; wanted at most {max_bytes}")
        head = self._exactly(head_bytes, until)
        try:
            return Frame(Kind(kind), head, [self._exactly(nbytes, until) for nbytes in sizes], fd)
        except ValueError as error:
            raise FrameError(str(error)) from error

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _receive_descriptor(self) -> int | None:
        """Receive the begin of a frame, and return the descriptor that came with it."""
        self._rest, fds, _, _ = socket.recv_fds(self._socket, _AHEAD_BYTES, 1)
        if not self._rest:
            raise EOFError("the stream has ended")
        return fds[0] if fds else None

    def _exactly(self, nbytes: int, until: float) -> bytes:
        """Return the next bytes of the stream. Many of them are received into one piece of memory."""
        if len(self._rest) < nbytes <= _AHEAD_BYTES:
            parts, missing = [self._rest], nbytes - len(self._rest)
            while missing > 0:
                parts.append(self._receive(_AHEAD_BYTES, 0, until))
                missing -= len(parts[-1])
            self._rest = b"".join(parts)
        data, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        if len(data) == nbytes:
            return data
        parts, missing = [data] if data else [], nbytes - len(data)
        while missing:
            parts.append(self._receive(missing, socket.MSG_WAITALL, until))
            missing -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _receive(self, nbytes: int, flags: int, until: float) -> bytes:
        self._limit(socket.SO_RCVTIMEO, until)
        try:
            data = self._socket.recv(nbytes, flags)
        except BlockingIOError as error:
            raise OverdueError("no frame, or a part of one, came in time") from error
        if not data:
            raise EOFError("the stream has ended")
        return data

    def _limit(self, option: int, until: float) -> None:
        """Limit how long the next call of the socket may take."""
        if until == math.inf:
            return
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise OverdueError("no frame came or was taken in time")
        whole = int(left_s)
        micros = max(int((left_s - whole) * 1e6), 0 if whole else 1000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))
