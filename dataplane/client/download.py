"""Receiving objects over DoGet into memory of one's own: whole and verified, or not at all.

Used by nodes, whose memory is the arena, and by readers that cannot map the arena of their node. One stream brings many
objects; a big object comes in ranges over several connections, since one connection carries one core's worth.
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
"""From this size on an object comes in several range streams."""
NUM_STREAMS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Each connection keeps about a core busy here and another one at the sender."""
_ALIGN = 4096

Whole = tuple[int, Ref, str]
"""An object's place among those asked for, its ref, and its digest."""


class Sink(Protocol):
    """Where objects go. `at` is the place of an object among those asked for."""

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """Memory for the bytes of an object whose sender describes it so; raises DataPlaneError to refuse it.

        OutOfSpaceError where there is none; at once, unless it can wait for some.
        """

    def done(self, whole: Sequence[Whole]) -> None:
        """All bytes of these are there and have the digests that they should."""

    def give_up(self, at: int) -> None:
        """The memory of `open` is not written any more, and what it holds is worth nothing."""

    def failed(self, at: int, error: DataPlaneError) -> None:
        """This object cannot be had from this sender; the others still can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How to ask: what else stands in the ticket, until when, and who watches."""

    ticket: Mapping[str, Any]
    deadline: float
    watch: StallWatch
    grace_s: float = 0.0
    """How much longer to wait for a sender that may say itself what it could not do in time."""

    def remaining(self) -> float:
        """Seconds to the deadline; never none at all."""
        return max(0.05, self.deadline - time.monotonic())

    def body(self, **body: Any) -> dict[str, Any]:
        """What to ask with."""
        return {**body, **self.ticket, "timeout_s": self.remaining()}

    def get(self, flight: fl.FlightClient, **body: Any) -> fl.FlightStreamReader:
        """Begin a stream."""
        remaining = self.remaining()
        ticket = fl.Ticket(dump(self.body(**body)))
        return flight.do_get(ticket, fl.FlightCallOptions(timeout=remaining + self.grace_s))


def receive_many(flight: fl.FlightClient, wanted: Sequence[Ref], sink: Sink, call: Call) -> None:
    """All objects over one stream. Raises what broke the stream; what had come whole by then is done."""
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
                        raise ChecksumError(f"bytes of {wanted[at].name} came without what describes them")
                    if coming is not None and coming.add(start, data):
                        coming = None
        if coming is not None:
            coming.check_whole()
    except BaseException:
        if coming is not None and coming.is_open:
            sink.give_up(coming.at)
        reader.cancel()
        raise


def receive_ranges(flights: Sequence[fl.FlightClient], wanted: Ref, sink: Sink, call: Call) -> None:
    """One big object, a range over each connection. Raises what broke any of them; nothing half done stays."""
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
            sink.give_up(0)  # every thread that wrote has ended
            raise
    sink.done([(0, ref, digest)])


class _Coming:
    """An object of which pieces are coming in."""

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
        """Take the next bytes; True when that was the last of them."""
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
        """Raise: the stream went on, or ended, before this object was whole."""
        raise ChecksumError(f"{self._ref.name} ended after {self._received} of {self._ref.nbytes} bytes")


def _begin(at: int, wanted: Ref, info: Mapping[str, Any], sink: Sink) -> _Coming | None:
    """What is to come of an object; None if nothing is, because its sender has none."""
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
    """Object, start, info and bytes of each row of a batch."""
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
    """What a sender says it sends, if that can be what is wanted, and the digest that its bytes must have."""
    try:
        there = ref if isinstance(ref, Ref) else Ref.from_dict(ref)  # type: ignore[arg-type]  # from_dict checks
    except ValueError as error:
        raise DataPlaneError(f"{wanted.name} came with a description that is no ref: {error}") from error
    check_array(there.dtype, there.shape, there.nbytes)
    if (there.name, there.kind) != (wanted.name, wanted.kind):
        raise ChecksumError(f"{there.kind} object {there.name} came in the place of {wanted.kind} {wanted.name}")
    if there.kind == "source" and digest != there.name.removeprefix("s/"):
        raise ChecksumError(f"{there.name} came with digest {digest}, which is not the one in its name")
    if there.kind == "derived" and digest != there.meta.get("checksum", digest):
        raise ChecksumError(f"{there.name} came with digest {digest}; its ref says {there.meta['checksum']}")
    return there, digest


def _described(schema: pa.Schema, wanted: Ref) -> tuple[Ref, str]:
    """As `announced`, of a stream of one object."""
    metadata = schema.metadata or {}
    try:
        ref, digest = json.loads(metadata[b"ref"]), metadata[b"checksum"].decode()
    except (KeyError, ValueError) as error:
        raise DataPlaneError(f"{wanted.name} came without a ref and a checksum in its schema") from error
    return announced(ref, digest, wanted)


def check_same(wanted: Ref, there: Ref) -> None:
    """ChecksumError where what is there has another size than the ref from which ranges were asked for."""
    if there.nbytes != wanted.nbytes:
        raise ChecksumError(
            f"{wanted.name} has {there.nbytes} bytes on node {there.node}, its ref says {wanted.nbytes}: "
            "refs are not edited; get a fresh one"
        )


def verify(ref: Ref, found: str, digest: str) -> None:
    """ChecksumError where what came has another digest than what was announced."""
    if found != digest:
        raise ChecksumError(f"{ref.name} arrived with digest {found}; sent was {digest}")


def spans(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Start and length of up to `count` ranges that begin at whole pages."""
    step = -(-nbytes // (count * _ALIGN)) * _ALIGN
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def _fetch_range(
    flight: fl.FlightClient, wanted: Ref, digest: str, span: tuple[int, int], target: np.ndarray, call: Call
) -> None:
    reader = call.get(flight, ref=wanted.to_dict(), start=span[0], length=span[1])
    with call.watch.over(reader):
        if _described(reader.schema, wanted)[1] != digest:
            raise ChecksumError(f"{wanted.name} was written again while its ranges were sent")
        _fill(reader, span, target, call)


def _fill(reader: fl.FlightStreamReader, span: tuple[int, int], target: np.ndarray, call: Call) -> None:
    """The bytes of one range stream, to their place."""
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
    for future in futures:
        future.result()
