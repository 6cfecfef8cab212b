"""DoGet: objects as streams of batches, for other hosts and for any Flight client.

One object, or a range of it, is a stream of uint8 batches that the schema's metadata describes. Many objects are one
stream of pieces (`schemas.PIECES`). If one object has an error, its row carries the error, and the other objects are
sent anyway. gRPC reads the bytes straight from the arena, and the lease ends when gRPC has sent them.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import DataPlaneError, MissingObjectError
from dataplane.core.json_body import dump, parse, take, take_refs
from dataplane.core.refs import Ref
from dataplane.core.schemas import BATCH_BYTES, PIECES
from dataplane.server.flight_info import describe
from dataplane.server.leasing import LeaseOptions, checksum, lease_ref, span, start_missing, try_lease
from dataplane.server.services import Services
from dataplane.storage.entries import Leased
from dataplane.storage.store import Store

GATHER_BELOW = 128 << 10
"""The size in bytes below which objects are copied together into one batch, which costs less than one batch each."""
_NO_BYTES = np.empty(0, np.uint8)
_INT32, _INT64, _TEXT, _BYTES = pa.int32(), pa.int64(), pa.string(), pa.binary()


def stream(services: Services, ticket: fl.Ticket) -> pa.RecordBatchReader:
    """Return the stream for a ticket: `{"name"}` or `{"ref"}`, both also with `start` and `length`, or `{"refs"}`.

    With `"local": true` no other node is asked. With `"make": false` only resident objects are sent.
    """
    body = parse(ticket.ticket, "the ticket")
    how = LeaseOptions.from_body(body, "the ticket")
    if "refs" in body:
        refs = take_refs(body, "the ticket")
        return pa.RecordBatchReader.from_batches(PIECES, _pieces(services, refs, how))
    return _stream_one(services, body, how)


def _stream_one(services: Services, body: Mapping[str, Any], how: LeaseOptions) -> pa.RecordBatchReader:
    leased = _lease_one(services, body, how)
    data = _buffer(services.store, leased)
    ref = leased.entry.ref
    start, length = span(body, ref)
    metadata = describe(ref) | {
        "checksum": checksum(services.store, leased),
        "ref": dump(ref.to_dict()).decode(),
    }
    schema = pa.schema([("data", pa.uint8())], metadata=metadata)
    array = pa.Array.from_buffers(pa.uint8(), length, [None, data.slice(start, length)])
    batches = (
        pa.record_batch([array.slice(at, BATCH_BYTES)], schema=schema) for at in range(0, max(length, 1), BATCH_BYTES)
    )
    return pa.RecordBatchReader.from_batches(schema, list(batches))


def _pieces(services: Services, refs: Sequence[Ref], how: LeaseOptions) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream of many objects while they are sent. An object is leased just before it is sent."""
    gathered = _Gathered()
    if how.is_made:
        start_missing(services, refs, how)
    for at, ref in enumerate(refs):
        try:
            while (leased := try_lease(services, ref, how)) is None:
                yield gathered.take()  # also an empty one, which tells the receiver that this node still works
            data = _buffer(services.store, leased)
            info = {"ref": leased.entry.ref.to_dict(), "checksum": checksum(services.store, leased)}
        except DataPlaneError as error:
            gathered.add(at, {"error": type(error).__name__, "message": str(error)}, None)
            continue
        if data.size < GATHER_BELOW:
            gathered.add(at, info, data)
            if gathered.is_full:
                yield gathered.take()
            continue
        if gathered.num_rows:
            yield gathered.take()
        for start in range(0, data.size, BATCH_BYTES):
            part = data.slice(start, min(BATCH_BYTES, data.size - start))
            yield _piece(at, start, "" if start else dump(info).decode(), part)
        del data, part  # otherwise the lease would last until the next object's turn
    if gathered.num_rows:
        yield gathered.take()


class _Gathered:
    """The rows of small objects that go into one batch."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str]] = []
        self._parts: list[np.ndarray] = []
        self._nbytes = 0

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return self._nbytes >= BATCH_BYTES or len(self._rows) >= 1024

    def add(self, at: int, info: Mapping[str, Any], data: pa.Buffer | None) -> None:
        self._rows.append((at, dump(info).decode()))
        self._parts.append(np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES)
        self._nbytes += len(self._parts[-1])

    def take(self) -> pa.RecordBatch:
        """Return the batch with copies of the bytes, and start an empty one."""
        ends = np.zeros(len(self._parts) + 1, np.int32)
        np.cumsum([len(part) for part in self._parts], out=ends[1:])
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.concatenate([*self._parts, _NO_BYTES]))]
        columns = [
            pa.array([at for at, _ in self._rows], pa.int32()),
            pa.array([0] * len(self._rows), pa.int64()),
            pa.array([info for _, info in self._rows], pa.string()),
            pa.Array.from_buffers(pa.binary(), len(self._rows), buffers),
        ]
        self._rows, self._parts, self._nbytes = [], [], 0
        return pa.record_batch(columns, schema=PIECES)


def _piece(at: int, start: int, info: str, data: pa.Buffer) -> pa.RecordBatch:
    """Return a batch of one row over bytes that stay where they are. It is built from packed columns, because
    converting values costs more."""
    text = info.encode()
    columns = [
        pa.Array.from_buffers(_INT32, 1, [None, pa.py_buffer(struct.pack("=i", at))], 0),
        pa.Array.from_buffers(_INT64, 1, [None, pa.py_buffer(struct.pack("=q", start))], 0),
        pa.Array.from_buffers(_TEXT, 1, [None, _ends(len(text)), pa.py_buffer(text)], 0),
        pa.Array.from_buffers(_BYTES, 1, [None, _ends(data.size), data], 0),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PIECES)


def _ends(size: int) -> pa.Buffer:
    """Return the offsets buffer of an Arrow column with one value of `size` bytes."""
    return pa.py_buffer(struct.pack("=ii", 0, size))


class _StreamLease:
    """A lease that keeps an object in place while gRPC still reads it. When the last reference is dropped, the lease
    ends without blocking."""

    __slots__ = ("_lease", "_store")

    def __init__(self, store: Store, lease: int) -> None:
        self._store = store
        self._lease = lease

    def __del__(self) -> None:
        self._store.end_later(self._lease)


def _buffer(store: Store, leased: Leased) -> pa.Buffer:
    """Return the object's bytes where they are. The lease ends with the last slice of the buffer."""
    lease = _StreamLease(store, leased.lease)
    data = store.content(leased.entry)
    owner = (data, lease)
    return pa.foreign_buffer(data.__array_interface__["data"][0], data.nbytes, base=owner)


def _lease_one(services: Services, body: Mapping[str, Any], how: LeaseOptions) -> Leased:
    offered = services.offers.lease_again(take(body, "the ticket", "lease", str)) if "lease" in body else None
    if offered is not None:
        return offered
    if "ref" in body:
        return lease_ref(services, take_refs({"refs": [body["ref"]]}, "the ticket")[0], how)
    name = take(body, "the ticket", "name", str)
    leased = services.store.lease_one(name)
    if leased is None:
        raise MissingObjectError(
            f"{name!r} is not resident on this node; a whole ref in the ticket would let it be made again"
        )
    return leased
