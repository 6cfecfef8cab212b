"""Download objects with DoGet into the caller's memory: an object arrives complete and verified, or not at all.

A node uses this to receive objects into its arena, and a reader uses it if it cannot map its node's arena. One stream
brings many objects. A big object comes in ranges over several connections, because the speed of one connection is
limited by one core.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from blake3 import blake3

from dataplane.client.arrivals import Arrivals, Sink
from dataplane.core.digests import digest_of
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.integrity import check_digest, check_layout, check_sent
from dataplane.core.json_body import dump
from dataplane.core.refs import Ref
from dataplane.core.schemas import PIECES
from dataplane.core.timers import TIMERS

RANGES_FROM = 16 << 20
"""The size in bytes from which an object is received in ranges over several streams."""
NUM_STREAMS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""The number of connections for a big object. Each connection keeps about one core busy here, and one at the sender."""
_ALIGN = 4096
"""The size of a page in bytes; ranges begin at multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The options of a download: additional fields of the ticket, the deadline, and the watch for stalled streams."""

    ticket: Mapping[str, Any]
    """The fields to add to each ticket."""
    deadline: float
    """The moment at which the download times out, in seconds of `time.monotonic`."""
    stall_s: float = math.inf
    """The seconds after which a stream is cancelled on which no data comes."""
    grace_s: float = 0.0
    """The seconds to wait beyond the deadline for the sender's own timeout error, which says more than Flight's."""

    @contextmanager
    def watched(self, reader: fl.FlightStreamReader) -> Iterator[Callable[[], None]]:
        """Cancel a stream on which no data comes for `stall_s`. Yield the function to call each time data came."""
        with TIMERS.limit(time.monotonic() + self.stall_s, reader.cancel) as timer:

            def seen() -> None:
                timer.at = time.monotonic() + self.stall_s

            yield seen

    def remaining(self) -> float:
        """Return the seconds to the deadline, at least 0.05."""
        return max(0.05, self.deadline - time.monotonic())

    def body(self, **body: Any) -> dict[str, Any]:
        """Return the body of a ticket: the given fields, the fields of `ticket`, and the seconds to the deadline as
        `timeout_s`."""
        return {**body, **self.ticket, "timeout_s": self.remaining()}

    def get(self, flight: fl.FlightClient, **body: Any) -> fl.FlightStreamReader:
        """Begin a DoGet stream, whose ticket has the given fields besides those of `ticket`."""
        remaining = self.remaining()
        ticket = fl.Ticket(dump(self.body(**body)))
        return flight.do_get(ticket, fl.FlightCallOptions(timeout=remaining + self.grace_s))


def receive_many(flight: fl.FlightClient, wanted: Sequence[Ref], sink: Sink, call: Call) -> None:
    """Receive all objects over one stream into the sink.

    Raises the error that broke the stream; objects that were complete before that are kept.
    """
    reader = call.get(flight, refs=[ref.to_dict() for ref in wanted])
    arrivals = Arrivals(wanted, sink)
    try:
        with call.watched(reader) as seen:
            if not reader.schema.equals(PIECES):
                raise DataPlaneError(f"a stream of many objects came as {reader.schema}; wanted {PIECES}")
            for chunk in reader:
                seen()
                arrivals.add(chunk.data)
        arrivals.check_whole()
    except BaseException:
        arrivals.discard()
        reader.cancel()
        raise


def receive_ranges(flights: Sequence[fl.FlightClient], wanted: Ref, sink: Sink, call: Call) -> None:
    """Receive one big object, one range over each connection, into the sink.

    Raises the first error of any range; then nothing of the object is kept.
    """
    parts = spans(wanted.nbytes, len(flights))
    first = call.get(flights[0], ref=wanted.to_dict(), start=parts[0][0], length=parts[0][1])
    with call.watched(first) as seen:
        ref, digest = _described(first.schema, wanted)
        if ref.nbytes != wanted.nbytes:  # the ranges were computed from it
            check_layout(wanted, ref.dtype, ref.shape, ref.nbytes)
        try:
            target = sink.open(0, ref)
        except DataPlaneError as error:
            first.cancel()
            sink.failed(0, error)
            return
        hashed = blake3(max_threads=blake3.AUTO)
        try:
            with ThreadPoolExecutor(max(1, len(parts) - 1), thread_name_prefix="range") as threads:
                others = [
                    threads.submit(_fetch_range, flight, wanted, digest, span, target, call)
                    for flight, span in zip(flights[1:], parts[1:], strict=False)
                ]
                _fill(first, parts[0], target, seen, hashed)
                _raise_first(others)
            hashed.update(target[parts[0][1] :].data)
            check_digest(ref, digest_of(hashed), digest)
        except BaseException:
            sink.discard(0)  # every thread that wrote has ended
            raise
    sink.done([(0, ref, digest)])


def _described(schema: pa.Schema, wanted: Ref) -> tuple[Ref, str]:
    """Return the sent ref and digest, as `check_sent` does, from the schema of a stream of one object."""
    metadata = schema.metadata or {}
    try:
        ref, digest = json.loads(metadata[b"ref"]), metadata[b"checksum"].decode()
    except (KeyError, ValueError) as error:
        raise DataPlaneError(f"{wanted.name} came without a ref and a checksum in its schema") from error
    return check_sent(ref, digest, wanted), digest


def spans(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Split `nbytes` bytes into up to `count` ranges that begin at whole pages; return (start, length) of each."""
    step = -(-nbytes // (count * _ALIGN)) * _ALIGN
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def _fetch_range(
    flight: fl.FlightClient, wanted: Ref, digest: str, span: tuple[int, int], target: np.ndarray, call: Call
) -> None:
    """Receive one range of an object into its position in `target`. Raises ChecksumError if the object changed between
    the ranges."""
    reader = call.get(flight, ref=wanted.to_dict(), start=span[0], length=span[1])
    with call.watched(reader) as seen:
        if _described(reader.schema, wanted)[1] != digest:
            raise ChecksumError(f"{wanted.name} was written again while its ranges were sent")
        _fill(reader, span, target, seen)


def _fill(
    reader: fl.FlightStreamReader,
    span: tuple[int, int],
    target: np.ndarray,
    seen: Callable[[], None],
    hashed: blake3 | None = None,
) -> None:
    """Write the bytes that arrive for one range to their position in `target`, the memory of the whole object. They are
    hashed while they are in the processor's cache, if `hashed` is given. `seen` is called each time data came."""
    at, end = span[0], span[0] + span[1]
    try:
        for chunk in reader:
            seen()
            column = chunk.data.column(0)
            if at + len(column) > end:
                raise ChecksumError(f"a range of {span[1]} bytes came longer")
            body = np.frombuffer(column.buffers()[1], np.uint8) if len(column) else np.empty(0, np.uint8)
            target[at : at + len(column)] = body[column.offset : column.offset + len(column)]
            if hashed is not None:
                hashed.update(target[at : at + len(column)].data)
            at += len(column)
        if at != end:
            raise ChecksumError(f"a range of {span[1]} bytes ended after {at - span[0]}")
    except BaseException:
        reader.cancel()
        raise


def _raise_first(futures: "Sequence[Future[None]]") -> None:
    """Wait for all futures, and raise the error of the first one that failed."""
    for future in futures:
        future.result()
