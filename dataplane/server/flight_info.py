"""GetFlightInfo, GetSchema and ListFlights: which objects the node has, and how any Flight client can fetch them."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, MissingObjectError
from dataplane.core.json_body import ONE_OBJECT_BYTES, dump, parse, take, take_refs, take_timeout_s
from dataplane.core.refs import Ref
from dataplane.server import do_exchange
from dataplane.server.auth import Caller
from dataplane.server.services import Services
from dataplane.server.timed_leases import DEFAULT_S, check_lease_s
from dataplane.storage.entries import Leased

MAX_LISTED = 1000


def describe(ref: Ref) -> dict[str, str]:
    """Return the metadata of an object's schema."""
    return {
        "name": ref.name,
        "kind": ref.kind,
        "dtype": ref.dtype,
        "shape": json.dumps(ref.shape),
        "meta": dump(dict(ref.meta)).decode(),
        "nbytes": str(ref.nbytes),
    }


def info(services: Services, descriptor: fl.FlightDescriptor, location: str) -> fl.FlightInfo:
    """Return the FlightInfo of an object: one endpoint, whose ticket is valid until its expiration time. The action
    `renew` changes that time.

    The descriptor is a path `[name]`, or a command `{"name"}` or `{"ref"}` (made again if necessary) with `lease_s` and
    `timeout_s`.
    """
    body = _asked(descriptor)
    lease_s = check_lease_s(take(body, "GetFlightInfo", "lease_s", int, float, default=DEFAULT_S), 0.1)
    leased = _lease(services, body)
    try:
        name, expires = services.offers.add(leased, lease_s)
    except BaseException:
        services.store.end_leases([leased.lease], services.offers.session)
        raise
    ref = leased.entry.ref
    ticket = dump({"ref": ref.to_dict(), "lease": name})
    expiry = pa.scalar(int(expires * 1_000_000), pa.timestamp("us", "UTC"))
    endpoint = fl.FlightEndpoint(ticket, [location], expiry, dump({"lease": name}))
    return fl.FlightInfo(_schema(ref), descriptor, [endpoint], ref.nbytes, ref.nbytes)


def schema(services: Services, descriptor: fl.FlightDescriptor) -> fl.SchemaResult:
    """Return the schema of an object's stream. The object is leased only during this call."""
    leased = _lease(services, _asked(descriptor))
    services.store.end_leases([leased.lease], services.offers.session)
    return fl.SchemaResult(_schema(leased.entry.ref))


def listing(services: Services, criteria: bytes, location: str) -> Iterator[fl.FlightInfo]:
    """Yield resident objects whose names begin with `criteria`: the first thousand, without leases."""
    prefix = criteria.decode("utf-8", "replace")
    for ref in services.store.resident(prefix, MAX_LISTED):
        descriptor = fl.FlightDescriptor.for_path(ref.name)
        endpoint = fl.FlightEndpoint(dump({"name": ref.name}), [location])
        yield fl.FlightInfo(_schema(ref), descriptor, [endpoint], ref.nbytes, ref.nbytes)


def renew(services: Services, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `renew`: extend a lease of GetFlightInfo to `lease_s` seconds from now; 0 ends it."""
    lease_s = check_lease_s(take(body, "renew", "lease_s", int, float, default=DEFAULT_S))
    return {"expires": services.offers.renew(take(body, "renew", "lease", str), lease_s)}


def _asked(descriptor: fl.FlightDescriptor) -> dict[str, Any]:
    if descriptor.descriptor_type != fl.DescriptorType.PATH:
        return parse(descriptor.command, "the descriptor", ONE_OBJECT_BYTES)
    if len(descriptor.path) != 1:
        raise BadRequestError(f"a path of {len(descriptor.path)} parts; wanted one: the object's name")
    return {"name": descriptor.path[0].decode("utf-8", "replace")}


def _lease(services: Services, body: Mapping[str, Any]) -> Leased:
    services.call_limits.check_leases(services.store.num_leases, 1)
    if "ref" in body:
        ref = take_refs({"refs": [body["ref"]]}, "the descriptor")[0]
        deadline = time.monotonic() + take_timeout_s(body, "the descriptor")
        return do_exchange.lease_or_make(services, ref, deadline, services.offers.session)
    name = take(body, "the descriptor", "name", str)
    leased = services.store.lease([name], services.offers.session)[0]
    if leased is None:
        raise MissingObjectError(f"{name!r} is not resident on this node; a whole ref would let it be made again")
    return leased


def _schema(ref: Ref) -> pa.Schema:
    return pa.schema([("data", pa.uint8())], metadata=describe(ref))
