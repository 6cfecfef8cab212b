"""DoGet: an object as a stream of uint8 batches, for other hosts and for any plain Flight client."""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane import exchanges
from dataplane.errors import MissingObjectError
from dataplane.store import Leased, Store
from dataplane.wire import BATCH_BYTES, dump, parse, take, take_refs, take_timeout_s

if TYPE_CHECKING:
    from dataplane.node import Node


def stream(node: "Node", ticket: fl.Ticket) -> fl.RecordBatchStream:
    """Stream an object as uint8 batches; dtype, shape and meta stand in the schema's metadata."""
    body = parse(ticket.ticket, "the ticket")
    leased = _lease(node, body)
    ref, slab = leased.entry.ref, leased.entry.slab
    owner = _StreamLease(node.store, leased.lease)
    data = pa.foreign_buffer(node.store.segment.address + slab.offset, slab.nbytes, base=owner)
    array = pa.Array.from_buffers(pa.uint8(), slab.nbytes, [None, data])
    metadata = {
        "name": ref.name,
        "kind": ref.kind,
        "dtype": ref.dtype,
        "shape": json.dumps(ref.shape),
        "meta": dump(dict(ref.meta)).decode(),
    }
    schema = pa.schema([("data", pa.uint8())], metadata=metadata)
    batches = (
        pa.record_batch([array.slice(start, BATCH_BYTES)], schema=schema)
        for start in range(0, max(slab.nbytes, 1), BATCH_BYTES)
    )
    return fl.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, list(batches)))


class _StreamLease:
    """Keeps an object in place while gRPC still reads it; the last reference ends the lease without blocking."""

    __slots__ = ("_lease", "_store")

    def __init__(self, store: Store, lease: int) -> None:
        self._store = store
        self._lease = lease

    def __del__(self) -> None:
        self._store.end_later(self._lease)


def _lease(node: "Node", body: Mapping[str, Any]) -> Leased:
    if "ref" in body:
        ref = take_refs({"refs": [body["ref"]]}, "the ticket")[0]
        deadline = time.monotonic() + take_timeout_s(body, "the ticket")
        return exchanges.lease_made(node, ref, deadline)
    name = take(body, "the ticket", "name", str)
    leased = node.store.lease_one(name)
    if leased is None:
        raise MissingObjectError(
            f"{name!r} is not resident on this node; a whole ref in the ticket would let it be made again"
        )
    return leased
