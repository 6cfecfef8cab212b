"""DoGet: objects as streams of batches, for other hosts and for any Flight client.

One object, or a range of it, is a stream of uint8 batches that the schema's metadata describes. Many objects are one
stream of pieces (`schemas.PIECES`). If one object has an error, its row carries the error, and the other objects are
sent anyway. gRPC reads the bytes straight from the arena, and the lease ends when gRPC has sent them. The bytes of an
object that is on disk only are read batch by batch.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import DataPlaneError, MissingObjectError
from dataplane.core.json_body import dump, parse, take, take_refs
from dataplane.core.refs import Ref
from dataplane.core.schemas import BATCH_BYTES, INLINE_BYTES, PIECES, packed_numbers, packed_strings
from dataplane.server.flight_info import describe
from dataplane.server.leasing import LeaseOptions, checksum, lease_ref, lease_some, span, start_missing
from dataplane.server.services import Services
from dataplane.storage.entries import Leased
from dataplane.storage.store import Store

RUN_OBJECTS = 64
"""The largest number of objects that are leased together."""
RUN_BYTES = 8 << 20
"""The number of bytes that are leased together, unless one object has more."""
_NO_BYTES = pa.py_buffer(b"")
_EMPTY = np.empty(0, np.uint8)


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
    data = _Bytes(services.store, leased)
    ref = leased.entry.ref
    start, length = span(body, ref)
    metadata = describe(ref) | {
        "checksum": checksum(services.store, leased),
        "ref": dump(ref.to_dict()).decode(),
    }
    schema = pa.schema([("data", pa.uint8())], metadata=metadata)
    batches = (
        pa.record_batch([data.array(start + at, min(BATCH_BYTES, length - at))], schema=schema)
        for at in range(0, max(length, 1), BATCH_BYTES)
    )
    return pa.RecordBatchReader.from_batches(schema, batches)


def _pieces(services: Services, refs: Sequence[Ref], how: LeaseOptions) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream of many objects while they are sent. Objects are leased in runs, just before they
    are sent, and in the order in which they become available."""
    if how.is_made:
        start_missing(services, refs, how)
    pending = deque(enumerate(refs))
    while pending:
        run = _take_run(pending)
        found = lease_some(services, [ref for _, ref in run], how)
        rows = deque(_rows(services, run, found))
        pending.extendleft(asked for asked, one in reversed([*zip(run, found, strict=True)]) if one is None)
        del found
        yield _take_batch(rows)  # also an empty one, which tells the receiver that this node still works
        while rows:
            yield _take_batch(rows)


def _take_run(pending: deque[tuple[int, Ref]]) -> list[tuple[int, Ref]]:
    """Return the next objects to lease: up to `RUN_OBJECTS` and about `RUN_BYTES`, by the sizes in their refs."""
    run, nbytes = [pending.popleft()], 0
    while pending and len(run) < RUN_OBJECTS:
        nbytes += run[-1][1].nbytes
        if nbytes + pending[0][1].nbytes > RUN_BYTES:
            break
        run.append(pending.popleft())
    return run


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of `schemas.PIECES`."""

    at: int
    start: int
    info: bytes
    size: int
    data: "_Bytes | None" = None

    def buffer(self) -> pa.Buffer:
        """Return the bytes of the piece."""
        return _NO_BYTES if self.data is None else self.data.slice(self.start, self.size)


def _rows(
    services: Services, run: Sequence[tuple[int, Ref]], found: Sequence[Leased | DataPlaneError | None]
) -> Iterator[_Row]:
    """Yield the pieces of the leased objects among `run`, a list of numbered refs, and the errors of those that cannot
    be described. Each lease ends with the last piece of its object."""
    contents = [_Bytes(services.store, one) if isinstance(one, Leased) else None for one in found]
    for (at, asked), one, data in zip(run, found, contents, strict=True):
        if one is None:
            continue
        if isinstance(one, DataPlaneError):  # not raised: it would keep this frame, and with it all leases
            yield _error_row(at, one)
            continue
        try:
            info = _described(services, asked, one)
        except DataPlaneError as error:
            yield _error_row(at, error)
            continue
        assert data is not None
        for start in range(0, max(1, data.size), BATCH_BYTES):
            yield _Row(at, start, b"" if start else dump(info), min(BATCH_BYTES, data.size - start), data)


def _error_row(at: int, error: DataPlaneError) -> _Row:
    """Return the row of an object that has an error."""
    return _Row(at, 0, dump({"error": type(error).__name__, "message": str(error)}), 0)


def _described(services: Services, asked: Ref, one: Leased) -> dict[str, Any]:
    """Return the `info` of a leased object."""
    info: dict[str, Any] = {"checksum": checksum(services.store, one)}
    if one.entry.ref != asked:
        info["ref"] = one.entry.ref.to_dict()
    return info


def _take_batch(rows: deque[_Row]) -> pa.RecordBatch:
    """Return the next rows, about `BATCH_BYTES` of data, as a batch over bytes that stay where they are."""
    taken: list[_Row] = []
    nbytes = 0
    while rows and (not taken or nbytes + rows[0].size <= BATCH_BYTES):
        nbytes += rows[0].size
        taken.append(rows.popleft())
    columns = [
        packed_numbers(pa.int32(), "i", [row.at for row in taken]),
        packed_numbers(pa.int64(), "q", [row.start for row in taken]),
        packed_strings([row.info for row in taken]),
        _views([row.buffer() for row in taken]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PIECES)


def _views(parts: Sequence[pa.Buffer]) -> pa.Array:
    """Return the binary_view column whose values are these buffers. Arrow keeps up to 12 bytes inside the view; longer
    values stay in a buffer of their own, so nothing is copied."""
    views = np.zeros((len(parts), 4), np.int32)  # length, first 4 bytes, number of the buffer, offset in it
    outside: list[pa.Buffer] = []
    for view, part in zip(views, parts, strict=True):
        view[0] = part.size
        data = np.frombuffer(part, np.uint8) if part.size else _EMPTY
        head = data if part.size <= INLINE_BYTES else data[:4]
        view.view(np.uint8)[4 : 4 + len(head)] = head
        if part.size > INLINE_BYTES:
            view[2] = len(outside)
            outside.append(part)
    return pa.Array.from_buffers(pa.binary_view(), len(parts), [None, pa.py_buffer(views), *outside], 0)


class _StreamLease:
    """A lease that keeps an object in place while gRPC still reads it. When the last reference is dropped, the lease
    ends without blocking."""

    __slots__ = ("_lease", "_store")

    def __init__(self, store: Store, lease: int) -> None:
        self._store = store
        self._lease = lease

    def __del__(self) -> None:
        self._store.end_later(self._lease)


class _Bytes:
    """The bytes of a leased object. The lease ends when this object and all slices over the arena are gone."""

    __slots__ = ("_arena", "_entry", "_lease", "_store", "size")

    def __init__(self, store: Store, leased: Leased) -> None:
        self._store = store
        self._entry = leased.entry
        self._lease = _StreamLease(store, leased.lease)
        self.size = leased.entry.ref.nbytes
        self._arena: pa.Buffer | None = None
        if leased.entry.slab is not None:
            data = store.content(leased.entry)
            owner = (data, self._lease)
            self._arena = pa.foreign_buffer(data.__array_interface__["data"][0], data.nbytes, base=owner)

    def slice(self, start: int, nbytes: int) -> pa.Buffer:
        """Return some of the bytes: where they are in the arena, or a copy of those on the disk."""
        if self._arena is not None:
            return self._arena.slice(start, nbytes)
        return pa.py_buffer(self._store.disk.read(self._entry, start, nbytes))

    def array(self, start: int, nbytes: int) -> pa.Array:
        """Return `slice` as an Arrow column."""
        return pa.Array.from_buffers(pa.uint8(), nbytes, [None, self.slice(start, nbytes)])


def _lease_one(services: Services, body: Mapping[str, Any], how: LeaseOptions) -> Leased:
    if "ref" in body:
        return lease_ref(services, take_refs({"refs": [body["ref"]]}, "the ticket")[0], how)
    name = take(body, "the ticket", "name", str)
    leased = services.store.lease_one(name)
    if leased is None:
        raise MissingObjectError(
            f"{name!r} is not resident on this node; a whole ref in the ticket would let it be made again"
        )
    return leased
