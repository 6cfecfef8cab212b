"""Writing big objects straight into a node's arena from the same machine, without mapping it.

The node gives a place, the bytes go there with `pwrite` (one copy, no page faults), then the node publishes them. The
place belongs to the stream over which it was asked for, so a writer that dies can leave nothing half written.
"""

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.errors import NodeUnavailableError
from dataplane.refs import Ref
from dataplane.wire import dump, from_body, parse

_CHUNK_BYTES = 1 << 30
_GRACE_S = 1.0

log = logging.getLogger(__name__)


class PlaceWriter:
    """Puts in place over one stream, opened on first use. Thread-safe; puts take turns."""

    def __init__(self, flight: fl.FlightClient, uri: str) -> None:
        self._flight = flight
        self._uri = uri
        self._lock = threading.Lock()
        self._stream: tuple[Any, Any] | None = None
        self._fd = -1
        self._is_remote = False

    def put(self, view: memoryview, body: Mapping[str, Any], timeout_s: float) -> Ref | None:
        """The ref, or None where the arena cannot be reached from here (the caller then sends the bytes)."""
        with self._lock:
            if self._is_remote or not self._open(timeout_s):
                return None
            place = self._ask({"allocate": view.nbytes, "timeout_s": timeout_s}, timeout_s)
            at = 0
            while at < view.nbytes:
                at += os.pwrite(self._fd, view[at : at + _CHUNK_BYTES], place["offset"] + at)
            return Ref.from_dict(self._ask({"seal": dict(body)}, timeout_s))

    def close(self) -> None:
        """End the stream; an unsealed place goes back to the node."""
        with self._lock:
            self._drop_stream()

    def _open(self, timeout_s: float) -> bool:
        if self._stream is not None:
            return True
        descriptor = fl.FlightDescriptor.for_command(dump({"verb": "put"}))
        self._stream = self._flight.do_exchange(descriptor)
        hello = self._read(timeout_s)
        try:
            self._fd = os.open(Path(hello["segments"][0]["path"]), os.O_WRONLY | os.O_NOFOLLOW)
        except OSError as error:
            log.info("the arena of %s is out of reach (%s); big objects go over Flight", self._uri, error)
            self._is_remote = True
            self._drop_stream()
            return False
        return True

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._stream is not None
        try:
            self._stream[0].write_metadata(pa.py_buffer(dump(request)))
        except pa.ArrowException:
            self._drop_stream()
            raise
        answer = self._read(timeout_s)
        error = from_body(answer)
        if error is not None:
            raise error
        return answer

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; a stream that takes too long is cut, and with it the place it held."""
        assert self._stream is not None
        reader = self._stream[1]
        is_overdue = threading.Event()

        def cut() -> None:
            is_overdue.set()
            reader.cancel()

        timer = threading.Timer(timeout_s + _GRACE_S, cut)
        timer.daemon = True
        timer.start()
        try:
            return parse(reader.read_chunk().app_metadata, "the answer to put")
        except pa.ArrowException as error:
            self._drop_stream()
            raise fl.FlightTimedOutError("no answer") if is_overdue.is_set() else error from error
        except StopIteration:
            self._drop_stream()
            raise NodeUnavailableError(
                f"{self._uri} ended the stream in the middle of a put; is the node running?"
            ) from None
        finally:
            timer.cancel()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            writer, self._stream = self._stream[0], None
            close_quietly(writer)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def close_quietly(writer: Any) -> None:
    """Close a stream that may be broken already."""
    try:
        writer.close()
    except (pa.ArrowException, OSError) as error:
        log.debug("a stream was broken when it was closed: %s", error)
