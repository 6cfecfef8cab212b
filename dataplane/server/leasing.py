"""Leases for objects that a DoGet or another node requests. Objects that are not resident are made first, if that is
allowed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, DataPlaneError, MissingObjectError, NodeTimeoutError, OutOfSpaceError
from dataplane.core.json_body import take, take_timeout_s
from dataplane.core.refs import Ref
from dataplane.server import do_exchange
from dataplane.server.services import Services
from dataplane.storage.entries import Leased
from dataplane.storage.store import INTERNAL_SESSION, Store

HEARTBEAT_S = 5.0
"""The interval in seconds at which a receiver that waits for an object gets an empty message, so that it knows that
this node still works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """How a request wants objects that are not resident to be treated, and the deadline."""

    deadline: float
    """The deadline, in seconds of `time.monotonic`."""
    is_local: bool
    """True if no other node is asked."""
    is_made: bool
    """False if only resident objects are sent."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any], what: str) -> Self:
        """Return the options that a ticket gives in `timeout_s`, `local` and `make`."""
        return cls(
            deadline=time.monotonic() + take_timeout_s(body, what),
            is_local=take(body, what, "local", bool, default=False),
            is_made=take(body, what, "make", bool, default=True),
        )


def start_missing(services: Services, refs: Sequence[Ref], how: LeaseOptions) -> None:
    """Begin to make the objects that are not resident, in parallel."""
    found = services.store.find_all([ref.name for ref in refs])
    missing = [ref for ref, entry in zip(refs, found, strict=True) if entry is None]
    services.deriver.start(missing, how.deadline, is_local=how.is_local)


def lease_ref(services: Services, ref: Ref, how: LeaseOptions) -> Leased:
    """Return a lease on one object. Waits for: its making, until the deadline. Raises the reason if that is
    impossible."""
    if how.is_made:
        return do_exchange.lease_or_make(services, ref, how.deadline, is_local=how.is_local)
    leased = services.store.lease_one(ref.name)
    if leased is None:
        raise MissingObjectError(f"{ref.name} is not resident on node {services.node_id}")
    return do_exchange.checked_lease(services, ref, leased)


def try_lease(services: Services, ref: Ref, how: LeaseOptions) -> Leased | None:
    """Return a lease like `lease_ref`, or None after `HEARTBEAT_S`, so that the caller can send the receiver an empty
    message."""
    soon = min(how.deadline, time.monotonic() + HEARTBEAT_S)
    try:
        return lease_ref(services, ref, replace(how, deadline=soon))
    except (NodeTimeoutError, OutOfSpaceError):
        if time.monotonic() >= how.deadline:
            raise
        return None


def lease_some(services: Services, refs: Sequence[Ref], how: LeaseOptions) -> list[Leased | DataPlaneError | None]:
    """Return for each object a lease, its error, or None if the caller must call again.

    If no object is resident, this waits for the first one, for at most `HEARTBEAT_S`.
    """
    found: list[Leased | DataPlaneError | None] = list(_resident(services, refs, how))
    if not any(found):
        found[0] = _or_error(partial(try_lease, services, refs[0], how))
        return found
    for at, leased in enumerate(found):
        if isinstance(leased, Leased):
            found[at] = _or_error(partial(do_exchange.checked_lease, services, refs[at], leased))
    return found


def checksum(store: Store, leased: Leased) -> str:
    """Return the digest with which a receiver checks an object's bytes. It is computed at most once."""
    entry = leased.entry
    if entry.ref.kind == "source":
        return entry.ref.name.removeprefix("s/")
    if not entry.digest:
        kept = entry.ref.meta.get("checksum") if entry.ref.kind == "derived" else None
        entry.digest = str(kept) if kept else content_digest(store.content(entry))
    return entry.digest


def span(body: Mapping[str, Any], ref: Ref) -> tuple[int, int]:
    """Return the range of bytes that a ticket names: all bytes, or `length` bytes from `start` on."""
    start = take(body, "the ticket", "start", int, default=0)
    length = take(body, "the ticket", "length", int, default=ref.nbytes - start)
    if start < 0 or length < 0 or start + length > ref.nbytes:
        raise BadRequestError(
            f"the ticket asks for {length} bytes from {start} on of {ref.name}, which has {ref.nbytes}; "
            "wanted a range inside it"
        )
    return start, length


def _resident(services: Services, refs: Sequence[Ref], how: LeaseOptions) -> list[Leased | None]:
    """Return leases on the resident objects. If a file cannot be read, return no leases; leasing one by one then gives
    the reason."""
    if how.is_made:
        services.deriver.drop_stale(refs)
    try:
        return services.store.lease([ref.name for ref in refs], INTERNAL_SESSION)
    except DataPlaneError:
        return [None] * len(refs)


def _or_error(lease: Callable[[], Leased | None]) -> Leased | DataPlaneError | None:
    try:
        return lease()
    except DataPlaneError as error:
        return error
