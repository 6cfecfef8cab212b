"""The DoExchange streams of a node: a reader's session and its resolve requests; the put in place is in
`do_exchange_put.py`.

Leases and unsealed slabs belong to a session (`sessions.py`). Those of a client that only opens a `resolve` or `put`
stream belong to that stream, and end with it. Requests and replies are JSON in the metadata of a message. Locators are
a record batch (the semantics of Arrow's Dissociated IPC protocol, bodies out of band).
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, DataPlaneError, OutOfSpaceError
from dataplane.core.integrity import check_claim
from dataplane.core.json_body import dump, take, take_list, take_refs, take_timeout_s
from dataplane.core.locators import Locators
from dataplane.core.refs import Ref
from dataplane.core.rights import Right
from dataplane.core.schemas import LOCATORS
from dataplane.server import do_exchange_put, scope_actions
from dataplane.server.request_stream import RequestStream
from dataplane.server.services import Services
from dataplane.server.sessions import Session
from dataplane.storage.entries import Leased
from dataplane.storage.store import INTERNAL_SESSION

LOOK_AHEAD = 64
"""The maximum number of objects being made that are leased together when the first of them is ready."""

log = logging.getLogger(__name__)


def session(
    services: Services,
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """Begin a session, or join the open one that the descriptor names. Waits for: the end of the stream.

    `{"present": {"pid"}}` says that the client holds the session's lock. `{"ended": [leases]}` gives back leases. With
    `"unheard": [streams], "heard": [numbers]` the client gives streams up, and says how many replies it got over each:
    it uses neither their slabs nor the leases of a later reply. With `"end": true` the session ends. Each message has
    the reply `{"is_open"}`. The first message says where the lock is; its `session` is empty if the named
    session is not open.
    """
    sessions = services.sessions
    named = take(body, "session", "session", str, default="")
    found = sessions.attach(named) if named else _begin(services, body)
    if found is None:
        writer.write_metadata(pa.py_buffer(dump({"session": "", **services.hello()})))
        return
    is_final = False
    try:
        presence = found.file.describe() if found.file is not None else None
        writer.write_metadata(pa.py_buffer(dump({"session": found.token, "presence": presence, **services.hello()})))
        requests = RequestStream(services, reader, context, "session", note="ended")
        for request in requests:
            try:
                answer = sessions.answer(found, request)
                is_final = take(request, "session", "end", bool, default=False)
            except DataPlaneError as error:
                answer = requests.refusal(error)
            writer.write_metadata(pa.py_buffer(dump(answer)))
            if is_final:
                break
    finally:
        sessions.detach(found, is_final=is_final)


def _begin(services: Services, body: Mapping[str, Any]) -> Session:
    """Begin the session that a descriptor asks for."""
    kind = take(body, "session", "kind", str, default="reader")
    if kind not in ("reader", "writer"):
        raise BadRequestError(f"session.kind is {kind[:40]!r}; wanted reader or writer")
    is_local = take(body, "session", "host", str, default="") == services.host_id
    return services.sessions.open("reader" if kind == "reader" else "writer", is_local=is_local)


def resolve(
    services: Services,
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """Reply to `{"names": [...]}` or `{"refs": [...]}` with locators, one row each. With `"as": "json"` the locators
    are JSON.

    A name that is not resident gets offset -1. Refs are made resident first, all or none. The leases belong to the
    session that the descriptor names, or without a name to this stream. `{"end": [leases]}` ends leases. If the reply
    may not have arrived (writing it failed, or the stream broke before the next message), its leases end here, unless
    the client holds its session's lock: then it says how many replies arrived over this stream, by its number `stream`.
    """
    own = take(body, "resolve", "session", str, default="")
    number = take(body, "resolve", "stream", int, default=0)
    token = own or secrets.token_hex(16)
    if not own:
        services.store.open_session(token)
    requests = RequestStream(services, reader, context, "resolve")
    num_replies = 0
    try:
        writer.begin(LOCATORS)
        if not own:
            writer.write_metadata(pa.py_buffer(dump(services.hello())))
        for request in requests:
            if "end" in request:
                services.store.end_leases(take_list(request, "resolve", "end", int), token)
            if "names" not in request and "refs" not in request:
                continue
            num_replies += 1
            try:
                leased = _lease_all(services, request, token)
            except BadRequestError:
                raise
            except DataPlaneError as error:
                writer.write_metadata(pa.py_buffer(dump(requests.refusal(error))))
            else:
                requests.unconfirmed = [item.lease for item in leased if item]
                if request.get("as") == "json":
                    writer.write_metadata(pa.py_buffer(_locate(leased).to_json()))
                else:
                    found = _locate(leased)
                    metadata = dump({"files": list(found.files)}) if found.files else b""
                    writer.write_with_metadata(found.to_batch(), pa.py_buffer(metadata))
    finally:
        if own:
            services.sessions.break_off(token, number, num_replies, requests.unconfirmed)
        else:
            services.store.end_session(token)


def lease_or_make(
    services: Services, ref: Ref, deadline: float, token: str = INTERNAL_SESSION, *, is_local: bool = False
) -> Leased:
    """Return a lease on an object. If it is not resident, it is made first. If that is impossible, this raises the
    reason."""
    services.deriver.drop_stale([ref])
    while True:
        leased = services.store.lease([ref.name], token)[0]
        if leased is not None:
            return checked_lease(services, ref, leased, token)
        if time.monotonic() > deadline:
            raise OutOfSpaceError(
                f"{ref.name} was made and evicted again before it could be leased; the working set of all readers does "
                "not fit the node: drop views, or start the node with more --memory"
            )
        services.deriver.make_resident([ref], deadline, is_local=is_local)


def _locate(leased: Sequence[Leased | None]) -> Locators:
    """Return the locators of leased objects: where each object is, what it is, and the lease that keeps it there."""
    refs = [item.entry.ref if item else None for item in leased]
    files = [item.entry.file for item in leased if item and item.entry.slab is None and item.entry.file]
    segments: list[int] = []
    offsets: list[int] = []
    num_files = 0
    for item in leased:
        place = (item.entry.slab or item.entry.file) if item else None
        is_in_file = item is not None and item.entry.slab is None
        num_files += is_in_file
        segments.append(num_files if is_in_file else 0)
        offsets.append(place.offset if place else -1)
    return Locators(
        segment=segments,
        offset=offsets,
        nbytes=[ref.nbytes if ref else 0 for ref in refs],
        dtype=[ref.dtype if ref else "bool" for ref in refs],
        shape=[ref.shape if ref else () for ref in refs],
        version=[ref.version if ref else 0 for ref in refs],
        lease=[item.lease if item else 0 for item in leased],
        files=[file.describe() for file in files],
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """A kind of DoExchange stream, and the right that it needs."""

    run: Callable[
        [
            Services,
            fl.ServerCallContext,
            Mapping[str, Any],
            fl.MetadataRecordBatchReader,
            fl.MetadataRecordBatchWriter,
        ],
        None,
    ]
    right: Right


EXCHANGES: Mapping[str, Exchange] = {
    "session": Exchange(session, Right.READ),
    "resolve": Exchange(resolve, Right.READ),
    "put": Exchange(do_exchange_put.put, Right.WRITE),
    "scopes": Exchange(scope_actions.keep_open, Right.WRITE),
}


def checked_lease(services: Services, ref: Ref, leased: Leased, token: str = INTERNAL_SESSION) -> Leased:
    """Return the lease. If the ref claims another checksum than the object has, end the lease and raise
    ChecksumError."""
    try:
        check_claim(ref, leased.entry.ref)
    except DataPlaneError:
        services.store.end_leases([leased.lease], token)
        raise
    return leased


def _lease_all(services: Services, request: Mapping[str, Any], token: str) -> Sequence[Leased | None]:
    if "names" in request:
        names = take_list(request, "resolve", "names", str)
        services.call_limits.check_leases(services.store.num_leases, len(names))
        found = services.store.lease(names, token)
        # a missing name counts as a miss later, when the caller asks for the whole ref
        services.meter.count_found(len(found) - found.count(None), 0)
        return found
    refs = take_refs(request, "resolve")
    services.call_limits.check_leases(services.store.num_leases, len(refs))
    deadline = time.monotonic() + take_timeout_s(request, "resolve")
    services.deriver.drop_stale(refs)
    leased: list[Leased] = []
    try:
        ordered: list[Leased | None] = list(services.store.lease([ref.name for ref in refs], token))
        leased += [item for item in ordered if item]
        for ref, item in zip(refs, ordered, strict=True):
            if item:
                check_claim(ref, item.entry.ref)
        missing = [at for at, item in enumerate(ordered) if item is None]
        services.meter.count_found(len(refs) - len(missing), len(missing))
        services.deriver.start([refs[at] for at in missing], deadline)
        window: list[int] = []
        waiting = iter(missing)
        while window := window + list(islice(waiting, LOOK_AHEAD - len(window))):
            found = _lease_next(services, [refs[at] for at in window], deadline, token)
            leased += [item for item in found if item]
            for at, item in zip(window, found, strict=True):
                if item:
                    check_claim(refs[at], item.entry.ref)
                    ordered[at] = item
            window = [at for at in window if ordered[at] is None]
    except BaseException:
        services.store.end_leases([item.lease for item in leased], token)
        raise
    return ordered


def _lease_next(services: Services, refs: Sequence[Ref], deadline: float, token: str) -> list[Leased | None]:
    """Wait until the first object is ready. Return a lease on it, and leases on those of the others that are ready
    too."""
    first = lease_or_make(services, refs[0], deadline, token)
    try:
        return [first, *services.store.lease([ref.name for ref in refs[1:]], token)]
    except BaseException:
        services.store.end_leases([first.lease], token)
        raise
