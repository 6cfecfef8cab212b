"""The best plain Flight stream: a bare server in a process of its own, one DoGet for all objects of a call.

Batches of up to 4 MiB come from a C++ reader, so no Python runs during the stream; both processes keep freed memory.
The consumer gets Arrow columns. An object above 4 MiB arrives in pieces, which are not joined.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pyarrow as pa
import pyarrow.flight as fl

from benchmarks.paths.measuring import Case, Helper, Measured, measure, requests
from dataplane.core.process import keep_freed_memory

BATCH_BYTES = 4 << 20
_SCHEMA = pa.schema([("data", pa.uint8())])


class _Server(fl.FlightServerBase):
    """Serves the record batches that it was given."""

    batches: list[pa.RecordBatch]

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        """Return a stream of the first objects; the ticket says how many."""
        wanted = self.batches[: int(ticket.ticket)] if ticket.ticket else self.batches
        return fl.RecordBatchStream(pa.RecordBatchReader.from_batches(_SCHEMA, wanted))


def serve(pipe: Connection) -> None:
    """Send the server's port, then load the cases that the owner names. This is the main function of the helper
    process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    server = _Server("grpc://127.0.0.1:0")
    for verb, *args in requests(pipe):
        if verb == "load":
            flat = [pa.array(payload.reshape(-1)) for payload in args[0].payloads()]
            pieces = [array.slice(at, BATCH_BYTES) for array in flat for at in range(0, len(array), BATCH_BYTES)]
            server.batches = [pa.record_batch([piece], schema=_SCHEMA) for piece in pieces]
        pipe.send(server.port)


def streamed(server: Helper, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure one DoGet for the whole case, and one for its first object."""
    client = fl.FlightClient(f"grpc://127.0.0.1:{server.ask('load', case)}")
    try:
        yield measure("flight/do_get", case, lambda _: client.do_get(fl.Ticket(b"")).read_all(), quick=quick)
        if case.count > 1:
            first = fl.Ticket(b"1")
            yield measure("flight/do_get", case.first(), lambda _: client.do_get(first).read_all(), quick=quick)
    finally:
        client.close()
        server.ask("load", case.first())
