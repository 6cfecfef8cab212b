"""DoPut: stores the one column of a stream of batches as an object. Bytes that come over Flight are always verified."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.arrays import ITEM_BYTES
from dataplane.core.errors import BadRequestError, NodeTimeoutError
from dataplane.core.process import TRIMMER
from dataplane.core.refs import Ref
from dataplane.core.schemas import arrow_errors_as_bad_requests
from dataplane.core.timers import TIMERS
from dataplane.server.publish import publish_puts
from dataplane.server.put_request import PutRequest
from dataplane.server.services import Services
from dataplane.server.unannounced_put import UnannouncedPut
from dataplane.storage.entries import Slab
from dataplane.storage.store import Store


def receive(services: Services, descriptor: fl.FlightDescriptor, reader: fl.MetadataRecordBatchReader) -> Ref:
    """Store the object that the descriptor describes, with the bytes of the stream. Return its ref."""
    request = PutRequest.from_descriptor(descriptor)
    with arrow_errors_as_bad_requests("the schema of DoPut"):
        dtype = _column_dtype(reader.schema)
    deadline = time.monotonic() + request.timeout_s
    try:
        slab = _receive(reader, request, dtype, services, deadline)
    except BaseException:
        TRIMMER.request()  # its messages have arrived, of any size
        raise
    services.meter.count_bytes(received=slab.nbytes)
    return publish_puts(services.store, [slab], [request], dtype, services.node_id)[0]


def _column_dtype(schema: pa.Schema) -> str:
    """Return the numpy name of the dtype of a DoPut's only column."""
    if len(schema) != 1:
        raise BadRequestError(f"DoPut with {len(schema)} columns ({', '.join(schema.names)}); wanted exactly one")
    kind = schema.field(0).type
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    if name == "bool" or name not in ITEM_BYTES:
        raise BadRequestError(f"DoPut with a column of {kind}; wanted numbers of fixed width, such as uint8")
    return name


def _chunks(reader: fl.MetadataRecordBatchReader, item: int, max_bytes: int) -> Iterator[np.ndarray]:
    """Yield the bytes of each batch."""
    while True:
        with arrow_errors_as_bad_requests("a batch of DoPut"):
            try:
                batch = reader.read_chunk().data
            except StopIteration:
                return
            if batch is None:
                continue
            batch.validate()  # its buffers may be shorter than its length, and counting nulls reads them
            column = batch.column(0)
        if column.null_count:
            raise BadRequestError(f"DoPut with {column.null_count} nulls; wanted numbers only")
        if column.nbytes > max_bytes:
            raise BadRequestError(
                f"DoPut with a batch of {column.nbytes} bytes; wanted at most {max_bytes} a batch: send more batches"
            )
        start = column.offset * item
        yield np.frombuffer(column.buffers()[1], np.uint8)[start : start + len(column) * item]


def _receive(
    reader: fl.MetadataRecordBatchReader, request: PutRequest, dtype: str, services: Services, deadline: float
) -> Slab:
    """Return the stream's bytes in a new slab. If the size was announced, they are written into the slab directly;
    otherwise they are collected first."""
    store = services.store
    chunks = _chunks(reader, ITEM_BYTES[dtype], services.call_limits.max_message_bytes)
    nbytes = request.announced_bytes
    if nbytes is None:
        return _collect(chunks, request, services, deadline)
    arriving = _Arriving(store, store.allocate(nbytes, deadline, request.scope))
    try:
        with TIMERS.limit(deadline, arriving.discard):  # Arrow has no way to end the read of a client that stopped
            for chunk in chunks:
                arriving.add(chunk)
            return arriving.finished()
    except BaseException:
        arriving.discard()
        raise


def _collect(chunks: Iterator[np.ndarray], request: PutRequest, services: Services, deadline: float) -> Slab:
    """Return bytes whose number was not announced in a new slab, after all of them have arrived."""
    store = services.store
    collected = UnannouncedPut(services.unannounced, store.segment.capacity)
    try:
        with TIMERS.limit(deadline, collected.expire):
            for chunk in chunks:
                collected.add(chunk)
        slab = store.allocate(collected.finished(), deadline, request.scope)
        try:
            collected.copy_to(store.view(slab))
        except BaseException:
            store.abort(slab)
            raise
        return slab
    finally:
        collected.discard()


class _Arriving:
    """A slab that is being filled, until it is full or discarded. Thread-safe."""

    def __init__(self, store: Store, slab: Slab) -> None:
        self._store = store
        self._slab = slab
        self._lock = threading.Lock()
        self._at = 0
        self._is_ours = True

    def add(self, chunk: np.ndarray) -> None:
        """Append the next bytes."""
        with self._lock:
            self._check_ours()
            if self._at + len(chunk) > self._slab.nbytes:
                raise BadRequestError(f"DoPut announced {self._slab.nbytes} bytes and sent more; announce what is sent")
            self._store.view(self._slab)[self._at : self._at + len(chunk)] = chunk
            self._at += len(chunk)

    def finished(self) -> Slab:
        """Return the full slab, which then belongs to the caller."""
        with self._lock:
            self._check_ours()
            if self._at != self._slab.nbytes:
                raise BadRequestError(
                    f"DoPut announced {self._slab.nbytes} bytes and sent {self._at}; announce what is sent"
                )
            self._is_ours = False
            return self._slab

    def discard(self) -> None:
        """Give the slab back to the arena, unless it became an object or was given back already."""
        with self._lock:
            if self._is_ours:
                self._is_ours = False
                self._store.abort(self._slab)

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise NodeTimeoutError(
                f"DoPut had brought {self._at} of {self._slab.nbytes} bytes, and no end, at its deadline; put it "
                "again, with a longer timeout_s"
            )
