"""Download objects with DoGet into the caller's memory: an object arrives complete and verified, or not at all.

A node uses this to receive objects into its arena, and a reader uses it if it cannot map its node's arena. One stream
brings many objects. A big object comes in ranges over several connections, because the speed of one connection is
limited by one core.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from blake3 import blake3

from dataplane.core.digests import content_digest, digest_of
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.flight_errors import from_body
from dataplane.core.json_body import dump, parse
from dataplane.core.refs import Ref
from dataplane.core.schemas import PIECES, check_array
from dataplane.core.stall_watch import StallWatch

RANGES_FROM = 16 << 20
"""The size in bytes from which an object is received in ranges over several streams."""
NUM_STREAMS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""The number of connections for a big object. Each connection keeps about one core busy here, and one at the sender."""
_ALIGN = 4096
"""The size of a page in bytes; ranges begin at multiples of it."""

Whole = tuple[int, Ref, str]
"""A complete object: its position among the requested objects, its ref, and the digest of its bytes."""


class Sink(Protocol):
    """The receiver of downloaded objects. `at` is the position of an object among the requested objects."""

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """Return the memory, as a flat uint8 array, into which the bytes of an object are written. `ref` is the
        sender's ref of the object.

        Raises a DataPlaneError to refuse the object. If there is no memory, raises OutOfSpaceError; with `can_wait`,
        the method may wait for memory first.
        """

    def done(self, whole: Sequence[Whole]) -> None:
        """Accept objects whose bytes have all arrived and match their digests."""

    def discard(self, at: int) -> None:
        """Free the memory that `open` gave for an object. The download writes no more into that memory, whose content
        is invalid."""

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Note that an object does not arrive, because the sender cannot send it or `open` refused it. Other objects
        still arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The options of a download: additional fields of the ticket, the deadline, and the watch for stalled streams."""

    ticket: Mapping[str, Any]
    """The fields to add to each ticket."""
    deadline: float
    """The moment at which the download times out, in seconds of `time.monotonic`."""
    watch: StallWatch
    """The watch that cancels a stream on which no data comes."""
    grace_s: float = 0.0
    """The seconds to wait beyond the deadline for the sender's own timeout error, which says more than Flight's."""

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
    coming: _Coming | None = None
    try:
        with call.watch.over(reader):
            if not reader.schema.equals(PIECES):
                raise DataPlaneError(f"a stream of many objects came as {reader.schema}; wanted {PIECES}")
            for chunk in reader:
                call.watch.seen(reader)
                for at, start, info, data in _rows(chunk.data, len(wanted)):
                    if info:
                        if coming is not None:
                            coming.check_whole()
                        coming = _begin(at, wanted[at], parse(info.encode(), "the info of an object"), sink)
                    elif coming is None or coming.at != at:
                        raise ChecksumError(f"bytes of {wanted[at].name} came without a description of the object")
                    if coming is not None and coming.add(start, data):
                        coming = None
        if coming is not None:
            coming.check_whole()
    except BaseException:
        if coming is not None and coming.is_open:
            sink.discard(coming.at)
        reader.cancel()
        raise


def receive_ranges(flights: Sequence[fl.FlightClient], wanted: Ref, sink: Sink, call: Call) -> None:
    """Receive one big object, one range over each connection, into the sink.

    Raises the first error of any range; then nothing of the object is kept.
    """
    parts = spans(wanted.nbytes, len(flights))
    first = call.get(flights[0], ref=wanted.to_dict(), start=parts[0][0], length=parts[0][1])
    with call.watch.over(first):
        ref, digest = _described(first.schema, wanted)
        check_same(wanted, ref)
        try:
            target = sink.open(0, ref)
        except DataPlaneError as error:
            first.cancel()
            sink.failed(0, error)
            return
        try:
            with ThreadPoolExecutor(max(1, len(parts) - 1), thread_name_prefix="range") as threads:
                others = [
                    threads.submit(_fetch_range, flight, wanted, digest, span, target, call)
                    for flight, span in zip(flights[1:], parts[1:], strict=False)
                ]
                _fill(first, parts[0], target, call)
                _raise_first(others)
            verify(ref, content_digest(target), digest)
        except BaseException:
            sink.discard(0)  # every thread that wrote has ended
            raise
    sink.done([(0, ref, digest)])


class _Coming:
    """An object whose pieces are arriving over a stream of many objects."""

    def __init__(self, at: int, ref: Ref, digest: str, target: np.ndarray | None, sink: Sink) -> None:
        self.at = at
        self.is_open = target is not None
        self._ref = ref
        self._digest = digest
        self._target = target
        self._sink = sink
        self._received = 0
        self._hash = blake3()

    def add(self, start: int, data: np.ndarray) -> bool:
        """Store the next bytes of the object. Return True if they were the last ones."""
        if start != self._received or start + len(data) > self._ref.nbytes:
            raise ChecksumError(
                f"bytes {start} to {start + len(data)} of {self._ref.name} came after {self._received} of "
                f"{self._ref.nbytes}; wanted them in order"
            )
        if self._target is not None:
            self._target[start : start + len(data)] = data
            self._hash.update(self._target.data[start : start + len(data)])
        self._received += len(data)
        if self._received < self._ref.nbytes:
            return False
        if self._target is not None:
            verify(self._ref, digest_of(self._hash), self._digest)
            self.is_open = False
            self._sink.done([(self.at, self._ref, self._digest)])
        return True

    def check_whole(self) -> None:
        """Raise ChecksumError, because the stream ended or began another object before all bytes of this object
        arrived."""
        raise ChecksumError(f"{self._ref.name} ended after {self._received} of {self._ref.nbytes} bytes")


def _begin(at: int, wanted: Ref, info: Mapping[str, Any], sink: Sink) -> _Coming | None:
    """Begin to receive the object that `info` describes. Return None if the sender reports an error instead of
    bytes."""
    error = from_body(info)
    if error is not None:
        sink.failed(at, error)
        return None
    ref, digest = announced(info.get("ref"), str(info.get("checksum")), wanted)
    try:
        return _Coming(at, ref, digest, sink.open(at, ref), sink)
    except DataPlaneError as refused:
        sink.failed(at, refused)
        return _Coming(at, ref, digest, None, sink)


def _rows(batch: pa.RecordBatch, num_wanted: int) -> Iterator[tuple[int, int, str, np.ndarray]]:
    """Yield (position among the requested objects, first byte, info, bytes) for each row of a record batch of
    pieces."""
    places, starts, infos = (batch.column(column).to_pylist() for column in range(3))
    column = batch.column(3)
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset :]
    body = column.buffers()[2]
    data = np.frombuffer(body, np.uint8) if body is not None and body.size else np.empty(0, np.uint8)
    for row, at in enumerate(places):
        if not 0 <= at < num_wanted:
            raise ChecksumError(f"a stream of {num_wanted} objects brought bytes of number {at}")
        yield at, starts[row], infos[row] or "", data[ends[row] : ends[row + 1]]


def announced(ref: object, digest: str, wanted: Ref) -> tuple[Ref, str]:
    """Check a sender's description of an object against the wanted ref; return the sent ref and the digest of the
    bytes.

    Raises ChecksumError if the sender describes another object, or if `digest` differs from the digest in the object's
    name or ref.
    """
    try:
        there = ref if isinstance(ref, Ref) else Ref.from_dict(ref)  # type: ignore[arg-type]  # from_dict checks
    except ValueError as error:
        raise DataPlaneError(f"{wanted.name} came with a description that is not a ref: {error}") from error
    check_array(there.dtype, there.shape, there.nbytes)
    if (there.name, there.kind) != (wanted.name, wanted.kind):
        raise ChecksumError(f"{there.kind} object {there.name} came instead of {wanted.kind} {wanted.name}")
    if there.kind == "source" and digest != there.name.removeprefix("s/"):
        raise ChecksumError(f"{there.name} came with digest {digest}, which is not the one in its name")
    if there.kind == "derived" and digest != there.meta.get("checksum", digest):
        raise ChecksumError(f"{there.name} came with digest {digest}; its ref says {there.meta['checksum']}")
    return there, digest


def _described(schema: pa.Schema, wanted: Ref) -> tuple[Ref, str]:
    """Return the sent ref and digest, as `announced` does, from the schema of a stream of one object."""
    metadata = schema.metadata or {}
    try:
        ref, digest = json.loads(metadata[b"ref"]), metadata[b"checksum"].decode()
    except (KeyError, ValueError) as error:
        raise DataPlaneError(f"{wanted.name} came without a ref and a checksum in its schema") from error
    return announced(ref, digest, wanted)


def check_same(wanted: Ref, there: Ref) -> None:
    """Check that an object has the number of bytes in its ref, from which the ranges were computed. Raises
    ChecksumError if not."""
    if there.nbytes != wanted.nbytes:
        raise ChecksumError(
            f"{wanted.name} has {there.nbytes} bytes on node {there.node}, its ref says {wanted.nbytes}: "
            "do not edit refs; get a fresh one"
        )


def verify(ref: Ref, found: str, digest: str) -> None:
    """Check that the digest `found` of the received bytes is the `digest` that the sender announced. Raises
    ChecksumError if not."""
    if found != digest:
        raise ChecksumError(f"{ref.name} arrived with digest {found}; its sender announced {digest}")


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
    with call.watch.over(reader):
        if _described(reader.schema, wanted)[1] != digest:
            raise ChecksumError(f"{wanted.name} was written again while its ranges were sent")
        _fill(reader, span, target, call)


def _fill(reader: fl.FlightStreamReader, span: tuple[int, int], target: np.ndarray, call: Call) -> None:
    """Write the bytes that arrive for one range to their position in `target`, the memory of the whole object."""
    at, end = span[0], span[0] + span[1]
    try:
        for chunk in reader:
            call.watch.seen(reader)
            column = chunk.data.column(0)
            if at + len(column) > end:
                raise ChecksumError(f"a range of {span[1]} bytes came longer")
            body = np.frombuffer(column.buffers()[1], np.uint8) if len(column) else np.empty(0, np.uint8)
            target[at : at + len(column)] = body[column.offset : column.offset + len(column)]
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
