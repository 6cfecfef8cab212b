"""One object over Flight with its digest: a DoPut of a buffer, and a DoGet into this process's own memory."""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.retry import GRACE_S
from dataplane.core.digests import content_digest
from dataplane.core.errors import ChecksumError
from dataplane.core.json_body import dump, parse
from dataplane.core.refs import Ref
from dataplane.core.schemas import BATCH_BYTES


def call_options(left_s: float) -> fl.FlightCallOptions:
    """Return the Flight options for a call that has `left_s` seconds: Flight's own timeout is `GRACE_S` longer."""
    return fl.FlightCallOptions(timeout=left_s + GRACE_S)


def put_copy(flight: fl.FlightClient, view: memoryview, body: Mapping[str, Any], left_s: float) -> Ref:
    """Store one object with a DoPut and return its ref."""
    command = fl.FlightDescriptor.for_command(dump({**body, "checksum": content_digest(view)}))
    array = pa.Array.from_buffers(pa.uint8(), view.nbytes, [None, pa.py_buffer(view)])
    schema = pa.schema([("data", pa.uint8())])
    writer, replies = flight.do_put(command, schema, call_options(left_s))
    with writer:
        for start in range(0, view.nbytes, BATCH_BYTES):
            writer.write_batch(pa.record_batch([array.slice(start, BATCH_BYTES)], schema=schema))
        writer.done_writing()
        reply = replies.read()
    return Ref.from_dict(parse(reply, "the reply to put"))


def get_copy(
    flight: fl.FlightClient, ticket: fl.Ticket, left_s: float, on_bytes: Callable[[int, int | None], None] | None
) -> bytes:
    """Return the bytes of one object. `on_bytes` is called with the number of bytes that have arrived, and with the
    total. Raises ChecksumError if the bytes do not match their digest."""
    reader = flight.do_get(ticket, call_options(left_s))
    metadata = reader.schema.metadata or {}
    total = int(metadata.get(b"nbytes", 0))
    parts: list[memoryview] = []
    for chunk in reader:
        column = chunk.data.column(0)
        parts.append(memoryview(column.buffers()[1])[column.offset : column.offset + len(column)])
        if on_bytes is not None:
            on_bytes(sum(map(len, parts)), total)
    data = b"".join(parts)
    sent = metadata.get(b"checksum", b"").decode()
    if sent and content_digest(data) != sent:
        raise ChecksumError(f"the node sent bytes that do not match digest {sent}, or too few; ask again")
    return data
