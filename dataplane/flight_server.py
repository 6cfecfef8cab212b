"""The Flight verbs of a node. Each parses its request and calls the store, the datasets or the deriver; nothing more.

DoPut stores, DoGet streams, DoAction does the rest; the DoExchange streams are in `exchanges.py`. A request that makes
no sense gets a Flight error that says so, and the node stays up.
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane import exchanges
from dataplane.errors import BadRequestError, DataPlaneError, MissingObjectError
from dataplane.puts import PutRequest, seal
from dataplane.refs import Ref
from dataplane.store import Leased, Slab, Store
from dataplane.wire import BATCH_BYTES, ITEM_BYTES, dump, parse, take, take_list, take_refs, take_timeout_s, to_flight

if TYPE_CHECKING:
    from dataplane.node import Node

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


def _answers_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Our errors become Flight errors; a bug is logged here and reported, and the node goes on."""

    @functools.wraps(verb)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except DataPlaneError as error:
            raise to_flight(error) from error
        except (fl.FlightError, pa.ArrowException):
            raise
        except Exception as error:
            log.exception("%s failed", verb.__name__)
            raise fl.FlightInternalError(f"{verb.__name__}: {type(error).__name__}: {error}") from error

    return wrapper


class FlightServer(fl.FlightServerBase):
    """Serves a node from gRPC's own threads, from construction on."""

    def __init__(self, host: str, port: int, node: "Node") -> None:
        self._node = node
        self._actions: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
            "stat": (self._stat, "{} -> counts and bytes"),
            "release": (self._release, '{"names": [...]} -> {"num_released"}'),
            "ingest": (self._ingest, '{"dataset"} -> the dataset and what is wrong with it'),
            "samples": (self._samples, '{"dataset", "indices": [...]} -> {"samples"}'),
            "derive": (self._derive, '{"refs": [...], "recipe": {...}} -> {"results": refs or bad media}'),
            "quarantine": (self._quarantine, '{} -> {"bad": bad media seen so far}'),
            "end_leases": (self._end_leases, '{"session", "leases": [...]} -> {}'),
        }
        try:
            super().__init__(f"grpc://{host}:{port}")
        except (pa.ArrowException, OSError) as error:
            raise BadRequestError(f"port {port} is taken on {host}, or may not be used; choose --port") from error

    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        """Every action with its body and answer."""
        return [(name, text) for name, (_, text) in self._actions.items()]

    @_answers_errors
    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        """A JSON body in, a JSON body out."""
        if action.type not in self._actions:
            raise BadRequestError(f"action {action.type!r} is unknown; wanted one of {', '.join(self._actions)}")
        body = parse(action.body or b"{}", f"the body of {action.type}") if action.body.size else {}
        return [dump(self._actions[action.type][0](body))]

    @_answers_errors
    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        """Stream an object as uint8 batches; dtype, shape and meta stand in the schema's metadata."""
        body = parse(ticket.ticket, "the ticket")
        leased = self._lease_for_get(body)
        ref, slab = leased.entry.ref, leased.entry.slab
        owner = _StreamLease(self._node.store, leased.lease)
        data = pa.foreign_buffer(self._node.store.segment.address + slab.offset, slab.nbytes, base=owner)
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

    @_answers_errors
    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Store the one column of a stream of batches; the ref comes back as metadata."""
        request = PutRequest.from_descriptor(descriptor)
        dtype = _column_dtype(reader.schema)
        deadline = time.monotonic() + request.timeout_s
        slab = _receive(reader, request, dtype, self._node.store, deadline)
        ref = seal(self._node.store, slab, request, dtype, self._node.node_id)
        writer.write(pa.py_buffer(dump(ref.to_dict())))

    @_answers_errors
    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """A stream of requests and answers; its verb stands in the descriptor: session, resolve or put."""
        body = parse(descriptor.command, "the descriptor of DoExchange")
        verb = take(body, "the descriptor of DoExchange", "verb", str)
        streams = {"session": exchanges.session, "resolve": exchanges.resolve, "put": exchanges.put}
        if verb not in streams:
            raise BadRequestError(f"verb {verb!r} of DoExchange is unknown; wanted one of {', '.join(streams)}")
        streams[verb](self._node, context, body, reader, writer)

    # -- actions ---------------------------------------------------------------------------------------------------

    def _stat(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._node.stat()

    def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"num_released": self._node.store.release(take_list(body, "release", "names", str))}

    def _ingest(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._node.datasets.ingest(take(body, "ingest", "dataset", str)).to_dict()

    def _samples(self, body: dict[str, Any]) -> dict[str, Any]:
        indices = take_list(body, "samples", "indices", int)
        samples = self._node.datasets.samples(take(body, "samples", "dataset", str), indices)
        return {"samples": [sample.to_dict() for sample in samples]}

    def _derive(self, body: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + take_timeout_s(body, "derive")
        refs = take_refs(body, "derive")
        made = self._node.deriver.derive(refs, take(body, "derive", "recipe", dict), deadline)
        return {
            "results": [{"ref": item.to_dict()} if isinstance(item, Ref) else {"bad": item.to_dict()} for item in made]
        }

    def _quarantine(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"bad": [bad.to_dict() for bad in self._node.deriver.quarantine()]}

    def _end_leases(self, body: dict[str, Any]) -> dict[str, Any]:
        leases = take_list(body, "end_leases", "leases", int)
        self._node.store.end_leases(leases, take(body, "end_leases", "session", str))
        return {}

    def _lease_for_get(self, body: dict[str, Any]) -> Leased:
        if "ref" in body:
            ref = take_refs({"refs": [body["ref"]]}, "the ticket")[0]
            deadline = time.monotonic() + take_timeout_s(body, "the ticket")
            return exchanges.lease_made(self._node, ref, deadline)
        name = take(body, "the ticket", "name", str)
        leased = self._node.store.lease_one(name)
        if leased is None:
            raise MissingObjectError(
                f"{name!r} is not resident on this node; a whole ref in the ticket would let it be made again"
            )
        return leased


class _StreamLease:
    """Keeps an object in place while gRPC still reads it; the last reference ends the lease without blocking."""

    __slots__ = ("_lease", "_store")

    def __init__(self, store: Store, lease: int) -> None:
        self._store = store
        self._lease = lease

    def __del__(self) -> None:
        self._store.end_later(self._lease)


def _column_dtype(schema: pa.Schema) -> str:
    """The numpy name of the one column of a DoPut."""
    if len(schema) != 1:
        raise BadRequestError(f"DoPut with {len(schema)} columns ({', '.join(schema.names)}); wanted exactly one")
    kind = schema.field(0).type
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    if name == "bool" or name not in ITEM_BYTES:
        raise BadRequestError(f"DoPut with a column of {kind}; wanted numbers of fixed width, such as uint8")
    return name


def _chunks(reader: fl.MetadataRecordBatchReader, item: int) -> Iterator[np.ndarray]:
    """The bytes of each batch."""
    for chunk in reader:
        column = chunk.data.column(0)
        if column.null_count:
            raise BadRequestError(f"DoPut with {column.null_count} nulls; wanted numbers only")
        start = column.offset * item
        yield np.frombuffer(column.buffers()[1], np.uint8)[start : start + len(column) * item]


def _receive(
    reader: fl.MetadataRecordBatchReader, request: PutRequest, dtype: str, store: Store, deadline: float
) -> Slab:
    """The stream's bytes in a new slab: straight in where the size was announced, gathered first where not."""
    chunks = _chunks(reader, ITEM_BYTES[dtype])
    nbytes = request.announced_bytes
    if nbytes is None:
        gathered, total = [], 0
        for chunk in chunks:
            gathered.append(chunk)
            total += len(chunk)
            if total > store.segment.capacity:
                raise BadRequestError(f"DoPut of more than {total} bytes; this node has {store.segment.capacity}")
        nbytes, chunks = total, iter(gathered)
    slab = store.allocate(nbytes, deadline)
    try:
        target, at = store.view(slab), 0
        for chunk in chunks:
            if at + len(chunk) > nbytes:
                raise BadRequestError(f"DoPut announced {nbytes} bytes and sent more; announce what is sent")
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        if at != nbytes:
            raise BadRequestError(f"DoPut announced {nbytes} bytes and sent {at}; announce what is sent")
    except BaseException:
        store.abort(slab)
        raise
    return slab
