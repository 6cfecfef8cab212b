"""The answers on a byte connection: objects in groups (runs). They are sent from where they are, each under a lease
that ends with its run.

A request is a ticket like that of DoGet: `{"refs"}`, or `{"ref"}` with `start` and `length`; also `local`, `make` and
`timeout_s`. The answer is a sequence of frames. Each frame is a header and the bytes of the objects that it describes:

    {"objects": [{"at", "checksum", "ref"} or {"at", "error", "message"}, ...]}   none: still at work
    {"end": true}

`ref` is left out if it equals the requested one. Objects are sent in the order in which they become available.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.core.byte_socket import STALL_S, ByteSocket
from dataplane.core.errors import DataPlaneError
from dataplane.core.json_body import take_refs
from dataplane.core.refs import Ref
from dataplane.server.leasing import LeaseOptions, checksum, lease_some, span, start_missing
from dataplane.server.services import Services
from dataplane.storage.entries import Leased
from dataplane.storage.store import INTERNAL_SESSION

RUN_OBJECTS = 64
RUN_BYTES = 8 << 20
"""The size of a run in bytes. Both ends do their bookkeeping once per run, because between big copies Python runs with
cold caches."""

_Asked = tuple[int, Ref]


def answer(services: Services, body: Mapping[str, Any], line: ByteSocket) -> None:
    """Send all objects of a request. Waits for: objects that are being made, and the receiver.

    BadRequestError for an invalid request. An error of one object is sent in the place of that object.
    """
    how = LeaseOptions.from_body(body, "the request")
    refs = take_refs(body if "refs" in body else {"refs": [body.get("ref")]}, "the request")
    if how.is_made:
        start_missing(services, refs, how)
    pending = deque(enumerate(refs))
    while pending:
        run = _take_run(pending)
        found = lease_some(services, [ref for _, ref in run], how)
        try:
            _send(services, line, run, found, {} if "refs" in body else body, how.deadline + STALL_S)
        finally:
            leases = [one.lease for one in found if isinstance(one, Leased)]
            services.store.end_leases(leases, INTERNAL_SESSION)
        pending.extendleft(asked for asked, one in reversed([*zip(run, found, strict=True)]) if one is None)
    line.send({"end": True}, until=how.deadline + STALL_S)


def _take_run(pending: deque[_Asked]) -> list[_Asked]:
    """Return the next objects to send: up to `RUN_OBJECTS` and about `RUN_BYTES`, by the sizes in their refs."""
    run, nbytes = [pending.popleft()], 0
    while pending and len(run) < RUN_OBJECTS:
        nbytes += run[-1][1].nbytes
        if nbytes + pending[0][1].nbytes > RUN_BYTES:
            break
        run.append(pending.popleft())
    return run


def _send(
    services: Services,
    line: ByteSocket,
    run: Sequence[_Asked],
    found: Sequence[Leased | DataPlaneError | None],
    ranged: Mapping[str, Any],
    until: float,
) -> None:
    """Send one frame with the found objects of a run. A frame without objects tells the receiver that this node still
    works."""
    objects, parts = [], []
    for (at, ref), one in zip(run, found, strict=True):
        if one is None:
            continue
        try:
            info, part = _described(services, ref, one, ranged)
        except DataPlaneError as error:
            objects.append({"at": at, "error": type(error).__name__, "message": str(error)})
            continue
        objects.append({"at": at, **info})
        parts.append(part)
    line.send({"objects": objects}, parts, until)
    services.meter.count_bytes(sent=sum(part.nbytes for part in parts))


def _described(
    services: Services, asked: Ref, one: Leased | DataPlaneError, ranged: Mapping[str, Any]
) -> tuple[dict[str, Any], memoryview]:
    """Return the header's entry for an object, and its bytes. If the object has an error, raise it."""
    if isinstance(one, DataPlaneError):
        raise one
    ref = one.entry.ref
    start, length = span(ranged, ref)
    info: dict[str, Any] = {"checksum": checksum(services.store, one)}
    if ref != asked:
        info["ref"] = ref.to_dict()
    return info, services.store.content(one.entry).data[start : start + length]
