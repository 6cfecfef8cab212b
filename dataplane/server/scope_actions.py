"""The requests about scopes: the stream that keeps a client's scopes open, and the actions that open, close and fill
them."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, MissingObjectError
from dataplane.core.json_body import SMALL_BODY_BYTES, check_plain_name, dump, parse, take
from dataplane.core.refs import BadMedia, Ref
from dataplane.core.schemas import arrow_errors_as_bad_requests
from dataplane.server.auth import Caller
from dataplane.server.services import Services

log = logging.getLogger(__name__)


def keep_open(
    services: Services,
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """DoExchange `scopes`: the client named `owner` counts as connected while this stream is open. With `{"end": true}`
    the client says that it is finished."""
    owner = take(body, "scopes", "owner", str)
    if not 16 <= len(owner) <= 128:
        raise BadRequestError(f"scopes.owner has {len(owner)} characters; wanted 16 to 128 that no other client uses")
    is_final = False
    services.scope_owners.arrive(owner)
    try:
        writer.write_metadata(pa.py_buffer(dump({"node": services.node_id, "grace_s": services.scope_owners.grace_s})))
        while not is_final:
            with arrow_errors_as_bad_requests("a message of scopes"):
                chunk = reader.read_chunk()
            message = parse(chunk.app_metadata, "a message of scopes", SMALL_BODY_BYTES)
            is_final = take(message, "scopes", "end", bool, default=False)
    except StopIteration:
        is_final = False
    except pa.ArrowException as error:
        log.info("a client that keeps scopes open is gone (%s)", str(error).split(".")[0])
    finally:
        services.scope_owners.depart(owner, is_final=is_final)


def open_scope(services: Services, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `open_scope`: open a scope, which ends when the `scopes` stream of its client has ended. The key `owner`
    of the body names the client."""
    name = check_plain_name(take(body, "open_scope", "name", str))
    quota_bytes = take(body, "open_scope", "quota_bytes", int, type(None), default=None)
    if quota_bytes is not None and quota_bytes <= 0:
        raise BadRequestError(f"open_scope.quota_bytes is {quota_bytes}; wanted more than 0, or none for no quota")
    owner = take(body, "open_scope", "owner", str)
    services.store.scopes.open(name, quota_bytes, owner)
    services.scope_owners.expect(owner)
    return {}


def close_scope(services: Services, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `close_scope`: close a scope and drop its plain objects."""
    num_dropped, dropped_bytes = services.store.scopes.close(take(body, "close_scope", "name", str))
    return {"num_dropped": num_dropped, "dropped_bytes": dropped_bytes}


def put_made_into_scope(services: Services, made: Sequence[Ref | BadMedia], scope: str, deadline: float) -> None:
    """Put derived objects into a scope. Objects that were evicted meanwhile are made again."""
    refs = {item.name: item for item in made if isinstance(item, Ref)}
    missing = services.store.scopes.join(list(refs), scope, deadline)
    while missing:
        if time.monotonic() > deadline:
            raise MissingObjectError(
                f"{missing[0]} was made and evicted again before it was in scope {scope!r}: ask for fewer at once, or "
                "start the node with more --memory"
            )
        services.deriver.make_resident([refs[name] for name in missing], deadline)
        missing = services.store.scopes.join(missing, scope, deadline)
