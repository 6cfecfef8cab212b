"""Writing big objects straight into a node's arena from the same machine, without mapping it.

The node gives a place, the bytes go there with `pwrite` (one copy, no page faults), then the node publishes them. The
place belongs to the stream over which it was asked for, so a writer that dies can leave nothing half written.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.errors import DataPlaneError, StreamLostError
from dataplane.hosts import default_host_id
from dataplane.refs import Ref
from dataplane.wire import dump, from_body, parse

_PART_BYTES = 8 << 20
"""Parts of a big object are written side by side: one core writes at half the speed of memory."""
_NUM_THREADS = min(4, os.cpu_count() or 1)
_GRACE_S = 1.0

log = logging.getLogger(__name__)


class PlaceWriter:
    """Puts in place over one stream, opened on first use. Thread-safe; puts take turns."""

    def __init__(self, flight: fl.FlightClient, uri: str) -> None:
        self._flight = flight
        self._uri = uri
        self._lock = threading.Lock()
        self._stream: tuple[Any, Any] | None = None
        self._path = Path()
        self._is_remote = False

    def put(self, view: memoryview, body: Mapping[str, Any], timeout_s: float) -> Ref | None:
        """The ref, or None where the arena cannot be reached from here (the caller then sends the bytes).

        Waits for: other puts of this writer, the node, room; all within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise fl.FlightTimedOutError("other puts of this client took all the time")
        try:
            fd = self._open(deadline)
            if fd is None:
                return None
            try:
                return self._put(fd, view, body, deadline)
            finally:
                os.close(fd)
        finally:
            self._lock.release()

    def _put(self, fd: int, view: memoryview, body: Mapping[str, Any], deadline: float) -> Ref:
        remaining = max(0.01, deadline - time.monotonic())
        request = {"allocate": view.nbytes, "timeout_s": remaining, "scope": body.get("scope")}
        place = self._ask(request, deadline)
        try:
            _write(fd, view, place["offset"])
            sealed = self._ask({"seal": dict(body)}, deadline)
        except DataPlaneError:
            raise  # the node's answer: it took the place back, or the stream is gone
        except BaseException:
            self._drop_stream()  # and with it the place
            raise
        return Ref.from_dict(sealed)

    def close(self) -> None:
        """End the stream; an unsealed place goes back to the node."""
        with self._lock:
            self._drop_stream()

    def _open(self, deadline: float) -> int | None:
        """The arena, opened for one put: whoever kept it open would keep a stopped node's memory."""
        if self._is_remote:
            return None
        is_fresh = self._stream is None
        if is_fresh:
            descriptor = fl.FlightDescriptor.for_command(dump({"verb": "put"}))
            self._stream = self._flight.do_exchange(descriptor)
            hello = self._read(deadline)
            self._path = Path(hello["segments"][0]["path"])
            if hello["host"] != default_host_id():
                log.info("the node at %s runs on another machine; big objects go over Flight", self._uri)
                self._is_remote = True
                self._drop_stream()
                return None
        try:
            return os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError as error:
            log.info("the arena of %s is out of reach (%s); big objects go over Flight", self._uri, error)
            self._is_remote = is_fresh  # else the node that this stream led to is gone
            self._drop_stream()
            return None

    def _ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        assert self._stream is not None
        try:
            self._stream[0].write_metadata(pa.py_buffer(dump(request)))
        except pa.ArrowException:
            self._drop_stream()
            raise
        answer = self._read(deadline)
        error = from_body(answer)
        if error is not None:
            raise error
        return answer

    def _read(self, deadline: float) -> dict[str, Any]:
        """The next answer; a stream that takes too long is cut, and with it the place it held."""
        assert self._stream is not None
        reader = self._stream[1]
        is_overdue = threading.Event()

        def cut() -> None:
            is_overdue.set()
            reader.cancel()

        timer = threading.Timer(max(0.0, deadline - time.monotonic()) + _GRACE_S, cut)
        timer.daemon = True
        timer.start()
        try:
            return parse(reader.read_chunk().app_metadata, "the answer to put")
        except pa.ArrowException as error:
            self._drop_stream()
            raise fl.FlightTimedOutError("no answer") if is_overdue.is_set() else error from error
        except StopIteration:
            self._drop_stream()
            raise StreamLostError(
                f"{self._uri} ended the stream in the middle of a put; is the node running?"
            ) from None
        finally:
            timer.cancel()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            writer, self._stream = self._stream[0], None
            close_quietly(writer)


def _write(fd: int, view: memoryview, offset: int) -> None:
    """The bytes to their place, by several threads where there are many."""
    parts = range(0, view.nbytes, _PART_BYTES)

    def write_part(start: int) -> None:
        at, end = start, min(start + _PART_BYTES, view.nbytes)
        while at < end:
            at += os.pwrite(fd, view[at:end], offset + at)

    if len(parts) < 2:
        write_part(0)
        return
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for done in [threads.submit(write_part, start) for start in parts]:
            done.result()


def close_quietly(writer: Any) -> None:
    """Close a stream that may be broken already."""
    try:
        writer.close()
    except (pa.ArrowException, OSError) as error:
        log.debug("a stream was broken when it was closed: %s", error)
