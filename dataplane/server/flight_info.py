"""GetFlightInfo, GetSchema and ListFlights: which objects the node has, and how any Flight client can fetch them."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, MissingObjectError
from dataplane.core.json_body import ONE_OBJECT_BYTES, dump, parse, take, take_refs, take_timeout_s
from dataplane.core.refs import Ref
from dataplane.server.do_exchange import lease_or_make
from dataplane.server.services import Services
from dataplane.storage.store import INTERNAL_SESSION

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
    """Return the FlightInfo of an object: its size, its schema and one endpoint. The ticket has the object's ref, so
    the object is made again if it was evicted before the DoGet.

    The descriptor is a path `[name]`, or a command `{"name"}` or `{"ref"}` (made if necessary) with `timeout_s`.
    """
    ref = _found(services, descriptor)
    endpoint = fl.FlightEndpoint(dump({"ref": ref.to_dict()}), [location])
    return fl.FlightInfo(_schema(ref), descriptor, [endpoint], ref.nbytes, ref.nbytes)


def schema(services: Services, descriptor: fl.FlightDescriptor) -> fl.SchemaResult:
    """Return the schema of an object's stream. The descriptor is that of `info`."""
    return fl.SchemaResult(_schema(_found(services, descriptor)))


def listing(services: Services, criteria: bytes, location: str) -> Iterator[fl.FlightInfo]:
    """Yield resident objects whose names begin with `criteria`: the first thousand, without leases."""
    prefix = criteria.decode("utf-8", "replace")
    for ref in services.store.resident(prefix, MAX_LISTED):
        descriptor = fl.FlightDescriptor.for_path(ref.name)
        endpoint = fl.FlightEndpoint(dump({"name": ref.name}), [location])
        yield fl.FlightInfo(_schema(ref), descriptor, [endpoint], ref.nbytes, ref.nbytes)


def _asked(descriptor: fl.FlightDescriptor) -> dict[str, Any]:
    if descriptor.descriptor_type != fl.DescriptorType.PATH:
        return parse(descriptor.command, "the descriptor", ONE_OBJECT_BYTES)
    if len(descriptor.path) != 1:
        raise BadRequestError(f"a path of {len(descriptor.path)} parts; wanted one: the object's name")
    return {"name": descriptor.path[0].decode("utf-8", "replace")}


def _found(services: Services, descriptor: fl.FlightDescriptor) -> Ref:
    """Return the ref of the object that a descriptor names. The object is leased only during this call."""
    body = _asked(descriptor)
    services.call_limits.check_leases(services.store.num_leases, 1)
    if "ref" in body:
        deadline = time.monotonic() + take_timeout_s(body, "the descriptor")
        leased = lease_or_make(services, take_refs({"refs": [body["ref"]]}, "the descriptor")[0], deadline)
    else:
        name = take(body, "the descriptor", "name", str)
        found = services.store.lease_one(name)
        if found is None:
            raise MissingObjectError(f"{name!r} is not resident on this node; a whole ref would let it be made again")
        leased = found
    services.store.end_leases([leased.lease], INTERNAL_SESSION)
    return leased.entry.ref


def _schema(ref: Ref) -> pa.Schema:
    return pa.schema([("data", pa.uint8())], metadata=describe(ref))
