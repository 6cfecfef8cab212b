"""DoExchange `put`: slabs of the arena for writers on this machine, which write into them and then seal them.

The slabs belong to their stream. A slab that is not sealed when the client closes the stream goes back to the arena. If
the stream breaks, the client may still write: the slabs of a client that holds its session's lock stay until it says
that it does not, or until its process has ended (`sessions.py`).
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.arrays import MAX_NUMBER
from dataplane.core.errors import BadRequestError, DataPlaneError, SessionLostError
from dataplane.core.json_body import dump, take, take_list, take_timeout_s
from dataplane.server.publish import Digests, publish_puts
from dataplane.server.put_request import PutRequest
from dataplane.server.request_stream import RequestStream
from dataplane.server.services import Services
from dataplane.server.sessions import Session
from dataplane.storage.entries import Slab

MAX_PLACES = 4096


def put(
    services: Services,
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """Reply to `{"allocate": nbytes}` with a slab, and `{"seal": {...}}` by publishing a written slab. Lists do many at
    once.

    `{"written": nbytes}`, counted over all slabs in their order, lets the node hash these bytes already. It has no
    reply. `{"abort": true}` gives the slabs back. After an error the stream has no slabs.
    """
    token = take(body, "put", "session", str, default="")
    number = take(body, "put", "stream", int, default=0)
    try:
        session = services.sessions.find(token) if token else None
    except SessionLostError as error:
        writer.write_metadata(pa.py_buffer(dump({"error": type(error).__name__, "message": str(error)})))
        return
    places = _PutStream(services, session)
    if session is not None:
        services.sessions.enter(session, number, places)
    try:
        requests = RequestStream(services, reader, context, "put", note="written")
        writer.write_metadata(pa.py_buffer(dump(services.hello())))
        for request in requests:
            try:
                answer = places.answer(request)
            except DataPlaneError as error:
                places.give_back()
                answer = requests.refusal(error)
            if answer is not None:
                writer.write_metadata(pa.py_buffer(dump(answer)))
    finally:
        if session is None:
            places.give_back()
        else:
            services.sessions.leave(session, number)


class _PutStream:
    """The unsealed slabs of one stream. The session of the client may take them back in another thread."""

    def __init__(self, services: Services, session: Session | None) -> None:
        self._services = services
        self._session = session
        self._lock = threading.Lock()
        self._slabs: list[Slab] = []
        self._digests = Digests(services.store, ())
        self._fault: DataPlaneError | None = None
        """The error of a `written` request. This request has no reply, so the error is returned with the next reply."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Do what a request says and return the reply; None if it has no reply."""
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
        """Hash written bytes. An error is kept and raised at the next request, because until then the writer uses the
        slabs."""
        try:
            if self._slabs and self._fault is None:
                self._digests.hash_until(take(request, "put", "written", int))
        except DataPlaneError as error:
            self._fault = error

    @property
    def held_bytes(self) -> int:
        """The bytes of the unsealed slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def give_back(self) -> None:
        """Give the unsealed slabs back to the arena."""
        for slab in self._take():
            self._services.store.abort(slab)

    def _take(self) -> list[Slab]:
        """Return the unsealed slabs, which this stream does not own any more."""
        with self._lock:
            taken, self._slabs = self._slabs, []
        return taken

    def _allocate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_many = isinstance(request.get("allocate"), list)
        sizes = take_list(request, "put", "allocate", int) if is_many else [take(request, "put", "allocate", int)]
        if not 0 < len(sizes) <= MAX_PLACES or min(sizes) < 0 or max(sizes) >= MAX_NUMBER:
            raise BadRequestError(
                f"put.allocate is {str(request['allocate'])[:60]}; wanted 0 bytes or more, or 1 to {MAX_PLACES} of such"
            )
        deadline = time.monotonic() + take_timeout_s(request, "put")
        scope = take(request, "put", "scope", str, type(None), default=None)
        slabs = self._services.store.allocate_many(sizes, deadline, scope)
        self._slabs = slabs
        if self._session is not None and not self._session.is_open:
            self.give_back()
            raise SessionLostError("the session of this put has ended")
        self._digests = Digests(self._services.store, slabs)
        places = [{"segment": 0, "offset": slab.offset} for slab in slabs]
        return {"places": places} if is_many else places[0]

    def _seal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_many = isinstance(request["seal"], list)
        bodies = request["seal"] if is_many else [take(request, "put", "seal", dict)]
        if len(bodies) != len(self._slabs) or not all(isinstance(body, dict) for body in bodies):
            raise BadRequestError(
                f"put.seal describes {len(bodies)} objects; wanted an object for each of {len(self._slabs)} places"
            )
        checked = [PutRequest.from_body(body) for body in bodies]
        written = self._take()
        if len(written) != len(checked):
            raise SessionLostError("the session of this put has ended")
        services = self._services
        published = publish_puts(services.store, written, checked, "uint8", services.node_id, self._digests)
        refs = [ref.to_dict() for ref in published]
        return {"refs": refs} if is_many else refs[0]
