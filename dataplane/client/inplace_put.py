"""Writing big objects straight into a node's arena from the same machine, without mapping it.

The node gives places, the bytes go there with `pwrite` (one copy, no page faults), then the node publishes them. While
they are written the node is told how far they are, and hashes what is there. The places belong to the stream over which
they were asked for, so a writer that dies can leave nothing half written.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow.flight as fl

from dataplane.client.inplace_stream import InplaceStream
from dataplane.core.errors import DataPlaneError, NodeUnavailableError
from dataplane.core.refs import Ref
from dataplane.core.shared_files import open_segment

_PART_BYTES = 4 << 20
"""What is written by one thread before the node is told: it is still in the cache when the node hashes it."""
_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""One core writes at half the speed of memory; the node hashes with as many."""

_Piece = tuple[memoryview, int]
"""Bytes and their place in the arena."""

log = logging.getLogger(__name__)


class InplacePut:
    """Puts in place over one stream, opened on first use. Thread-safe; puts take turns."""

    def __init__(self, flight: fl.FlightClient, uri: str) -> None:
        self._flight = flight
        self._uri = uri
        self._lock = threading.Lock()
        self._stream: InplaceStream | None = None
        self._is_remote = False

    def put(
        self, views: Sequence[memoryview], bodies: Sequence[Mapping[str, Any]], scope: str | None, timeout_s: float
    ) -> list[Ref] | None:
        """The refs, or None where the arena cannot be reached from here (the caller then sends the bytes).

        One round trip gives the places, another seals them. Waits for: other puts of this writer, the node, room; all
        within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise fl.FlightTimedOutError("other puts of this client took all the time")
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
        remaining = max(0.01, deadline - time.monotonic())
        stream = self._stream
        assert stream is not None
        sizes = [view.nbytes for view in views]
        places = stream.ask({"allocate": sizes, "timeout_s": remaining, "scope": scope}, deadline)["places"]
        try:
            offsets = [place["offset"] for place in places]
            if any(not 0 <= at <= stream.segment["nbytes"] - nbytes for at, nbytes in zip(offsets, sizes, strict=True)):
                raise NodeUnavailableError(f"{self._uri} gave a place outside of its arena: it is no data-plane node")
            for num_bytes in _write(fd, list(_parts(zip(views, offsets, strict=True)))):
                stream.tell({"written": num_bytes})
            sealed = stream.ask({"seal": [dict(body) for body in bodies]}, deadline)
        except DataPlaneError:
            raise  # the node's answer: it took the places back, or the stream is gone
        except BaseException:
            self._drop_stream()  # and with it the places
            raise
        return [Ref.from_dict(ref) for ref in sealed["refs"]]

    def close(self) -> None:
        """End the stream; an unsealed place goes back to the node."""
        with self._lock:
            self._drop_stream()

    def _open(self, deadline: float) -> int | None:
        """The arena, opened for one put: whoever kept it open would keep a stopped node's memory."""
        if self._is_remote:
            return None
        is_fresh = self._stream is None or not self._stream.is_open
        if self._stream is None or not self._stream.is_open:
            self._stream = InplaceStream(self._flight, self._uri, deadline)
        if not self._stream.is_same_host:
            log.info("the node at %s runs on another machine; big objects go over Flight", self._uri)
            self._is_remote = True
            self._drop_stream()
            return None
        try:
            return open_segment(self._stream.segment, os.O_WRONLY)
        except OSError as error:
            log.info("the arena of %s is out of reach (%s); big objects go over Flight", self._uri, error)
            self._is_remote = is_fresh  # else the node that this stream led to is gone
            self._drop_stream()
            return None

    def _drop_stream(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()


def _parts(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """The pieces in order, cut and gathered into parts of about the same size."""
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


def _write(fd: int, parts: Sequence[list[_Piece]]) -> Iterator[int]:
    """Write the parts, by several threads where there are cores; after each part, how many bytes are written in all."""
    write = partial(_write_part, fd)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:  # which has none yet: for one part none is worth starting
        yield from accumulate(threads.map(write, parts) if min(len(parts), _NUM_THREADS) > 1 else map(write, parts))


def _write_part(fd: int, part: list[_Piece]) -> int:
    for view, offset in part:
        at = 0
        while at < view.nbytes:
            at += os.pwrite(fd, view[at:], offset + at)
    return sum(view.nbytes for view, _ in part)
