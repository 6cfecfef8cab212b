"""Put big objects from the node's machine: the client writes their bytes into the arena without mapping it.

The node allocates slabs, the client writes the bytes there with `pwrite` (one copy, no page faults), and then the node
seals the objects. While the client writes, it reports its progress and the node hashes the written bytes. The slabs
belong to a session, which lasts as long as this process (`node_session.py`): a client that dies leaves no half-written
object, and one that stands still writes into no other client's.
"""

import logging
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow.flight as fl

from dataplane.client.connect import Credentials
from dataplane.client.current_session import CurrentSession
from dataplane.client.inplace_stream import InplaceStream
from dataplane.client.node_session import NodeSession
from dataplane.core.errors import SessionLostError
from dataplane.core.refs import Ref
from dataplane.core.shared_files import open_segment

_PART_BYTES = 4 << 20
"""The number of bytes that a thread writes before the client reports them. So few bytes are still in the CPU cache when
the node hashes them."""
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""The number of threads that write. One core reaches only half the speed of memory; the node hashes with as many
threads."""

_Piece = tuple[memoryview, int]
"""A part of an object: its bytes, and their offset in the arena in bytes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PutSession:
    """The session of a client that writes into the arena without mapping it."""

    node: NodeSession


class InplacePut:
    """Stores objects by writing them into the arena, over one session and one stream, which are opened on first use.

    It is thread-safe; one put runs at a time.
    """

    def __init__(self, flight: fl.FlightClient, uri: str, timeout_s: float, credentials: Credentials | None) -> None:
        """`credentials`: for another connection, if that of `flight` breaks."""
        self._uri = uri

        def open_session(open_s: float) -> _PutSession:
            return _PutSession(NodeSession(uri, "writer", timeout_s, credentials, open_s, flight))

        self._current = CurrentSession(uri, open_session)
        self._lock = threading.Lock()
        self._stream: InplaceStream | None = None
        self._is_remote = False

    def put(
        self, views: Sequence[memoryview], bodies: Sequence[Mapping[str, Any]], scope: str | None, timeout_s: float
    ) -> list[Ref] | None:
        """Store objects and return their refs. Return None if the arena cannot be reached and the caller must use
        Flight.

        This takes one round trip to allocate the slabs and one to seal the objects. It waits up to `timeout_s` for
        other puts of this client, for the node, and for free memory.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise fl.FlightTimedOutError("other puts of this client took all of the time")
        try:
            fd = self._open(deadline)
            if fd is None:
                return None
            try:
                return self._put(fd, views, bodies, scope, deadline)
            finally:
                os.close(fd)
        finally:
            self._lock.release()

    def _put(
        self,
        fd: int,
        views: Sequence[memoryview],
        bodies: Sequence[Mapping[str, Any]],
        scope: str | None,
        deadline: float,
    ) -> list[Ref]:
        """Allocate slabs, write the bytes and seal the objects over the open stream; return their refs. `fd` is the
        descriptor of the arena."""
        stream = self._stream
        assert stream is not None
        offsets = stream.allocate([view.nbytes for view in views], scope, deadline)
        try:
            with closing(_write(fd, list(_parts(zip(views, offsets, strict=True))))) as progress:
                for num_bytes in progress:
                    if stream.session.is_lost:
                        raise SessionLostError(f"the node at {self._uri} ended the session of this put")
                    stream.tell({"written": num_bytes})
            return stream.seal(bodies, deadline)
        except BaseException:
            if stream.has_slabs:
                self._drop_stream()  # which frees the slabs, now that no thread writes into them
            raise

    def close(self) -> None:
        """End the stream and the session; the node frees slabs that are not sealed."""
        with self._lock:
            self._drop_stream()
            self._current.close()

    def _open(self, deadline: float) -> int | None:
        """Return a file descriptor of the arena for one put; None if the arena cannot be reached.

        The arena is opened for each put, because an open descriptor would keep the memory of a stopped node.
        """
        if self._is_remote:
            return None
        session = self._current.get(deadline - time.monotonic()).node
        if not session.is_present:
            self._is_remote = True
            self._current.close()
            return None
        is_fresh = self._stream is None or not self._stream.is_open or self._stream.session is not session
        if self._stream is None or is_fresh:
            try:
                self._stream = InplaceStream(session, deadline)
            except SessionLostError:
                session.lose()
                raise
        try:
            return open_segment(self._stream.segment, os.O_WRONLY)
        except OSError as error:
            log.info("the arena of %s cannot be reached (%s); big objects go over Flight", self._uri, error)
            self._is_remote = is_fresh  # otherwise the node behind an older stream is gone
            self._drop_stream()
            return None

    def _drop_stream(self) -> None:
        """Close the stream, if there is one; the next put opens another."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()


def _parts(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces in order, split and grouped into lists of about `_PART_BYTES` bytes."""
    part: list[_Piece] = []
    room = _PART_BYTES
    for view, offset in pieces:
        for start in range(0, view.nbytes, _PART_BYTES):
            part.append((view[start : start + _PART_BYTES], offset + start))
            room -= part[-1][0].nbytes
            if room <= 0:
                yield part
                part, room = [], _PART_BYTES
    if part:
        yield part


def _write(fd: int, parts: Sequence[list[_Piece]]) -> Generator[int, None, None]:
    """Write the parts, with several threads if there are several parts and cores; after each part yield the total of
    written bytes."""
    write = partial(_write_part, fd)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # no thread starts before `threads.map`: one part needs none
        yield from accumulate(threads.map(write, parts) if min(len(parts), _NUM_THREADS) > 1 else map(write, parts))


def _write_part(fd: int, part: list[_Piece]) -> int:
    """Write these pieces at their offsets in the file, and return their number of bytes."""
    for view, offset in part:
        at = 0
        while at < view.nbytes:
            at += os.pwrite(fd, view[at:], offset + at)
    return sum(view.nbytes for view, _ in part)
