"""DoExchange `put`, the node's side: places in the arena for writers on this machine, who write and then seal.

Places belong to their stream: those that were not sealed when it ends, because its owner closed it or because the
kernel closed the connection of a process that died, go back to the arena.
"""

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, DataPlaneError
from dataplane.core.json_body import MAX_NUMBER, dump, take, take_list, take_timeout_s
from dataplane.server.publish import Digests, PutRequest, seal_all
from dataplane.server.request_stream import RequestStream
from dataplane.server.services import Services
from dataplane.storage.entries import Slab

MAX_PLACES = 4096


def put(
    services: Services,
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """`{"allocate": nbytes}` gives a place, `{"seal": {...}}` publishes what was written; lists do many at once.

    `{"written": nbytes}`, of all places in their order, lets the node hash so far, and has no answer. `{"abort": true}`
    gives the places back. After an error the stream has no places.
    """
    places = _PutStream(services)
    requests = RequestStream(services, reader, context, "put", note="written")
    writer.write_metadata(pa.py_buffer(dump(services.hello())))
    try:
        for request in requests:
            try:
                answer = places.answer(request)
            except DataPlaneError as error:
                places.give_back()
                answer = requests.refusal(error)
            if answer is not None:
                writer.write_metadata(pa.py_buffer(dump(answer)))
    finally:
        places.give_back()


class _PutStream:
    """The unsealed places of one stream."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._slabs: list[Slab] = []
        self._digests = Digests(services.store, ())
        self._fault: DataPlaneError | None = None
        """What is wrong with a message that has no answer: the answer to the next request."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Do what a request says; None where it has no answer."""
        if "written" in request:
            self._hash(request)
            return None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if "abort" in request:
            self.give_back()
            return {}
        if "seal" in request and self._slabs:
            return self._seal(request)
        if self._slabs:
            raise BadRequestError("put: a second allocate before the first was sealed; seal it first")
        return self._allocate(request)

    def _hash(self, request: Mapping[str, Any]) -> None:
        """Raises nothing: the places are being written to, and stay until the writer asks for something."""
        try:
            if self._slabs and self._fault is None:
                self._digests.hash_until(take(request, "put", "written", int))
        except DataPlaneError as error:
            self._fault = error

    def give_back(self) -> None:
        """What was not sealed goes back to the arena."""
        while self._slabs:
            self._services.store.abort(self._slabs.pop())

    def _allocate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_many = isinstance(request.get("allocate"), list)
        sizes = take_list(request, "put", "allocate", int) if is_many else [take(request, "put", "allocate", int)]
        if not 0 < len(sizes) <= MAX_PLACES or min(sizes) < 0 or max(sizes) >= MAX_NUMBER:
            raise BadRequestError(
                f"put.allocate is {str(request['allocate'])[:60]}; wanted 0 bytes or more, or 1 to {MAX_PLACES} of such"
            )
        deadline = time.monotonic() + take_timeout_s(request, "put")
        scope = take(request, "put", "scope", str, type(None), default=None)
        self._slabs = self._services.store.allocate_many(sizes, deadline, scope)
        self._digests = Digests(self._services.store, self._slabs)
        places = [{"segment": 0, "offset": slab.offset} for slab in self._slabs]
        return {"places": places} if is_many else places[0]

    def _seal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_many = isinstance(request["seal"], list)
        bodies = request["seal"] if is_many else [take(request, "put", "seal", dict)]
        if len(bodies) != len(self._slabs) or not all(isinstance(body, dict) for body in bodies):
            raise BadRequestError(
                f"put.seal describes {len(bodies)} objects; wanted an object for each of {len(self._slabs)} places"
            )
        checked = [PutRequest.from_body(body) for body in bodies]
        written, self._slabs = self._slabs, []
        sealed = seal_all(self._services.store, written, checked, "uint8", self._services.node_id, self._digests)
        refs = [ref.to_dict() for ref in sealed]
        return {"refs": refs} if is_many else refs[0]
