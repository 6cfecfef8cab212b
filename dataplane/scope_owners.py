"""The node's side of scopes: who keeps them open, and the actions that open, close and fill them.

A scope that is not kept belongs to the clients that opened it. Each such client holds a stream; when it breaks, the
client has a grace period to come back, and then its scopes close.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.deadlines import Deadlines
from dataplane.errors import BadRequestError, MissingObjectError
from dataplane.refs import BadMedia, Ref
from dataplane.security import Caller
from dataplane.store import Store
from dataplane.wire import SMALL_BODY_BYTES, check_plain_name, dump, parse, reading, take, take_refs, take_timeout_s

if TYPE_CHECKING:
    from dataplane.node import Node

GRACE_S = 30.0
"""How long a client whose stream broke may take to come back."""

log = logging.getLogger(__name__)


class ScopeOwners:
    """Which clients are there. Thread-safe."""

    def __init__(self, store: Store, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._store = store
        self._lock = threading.Lock()
        self._num_streams: dict[str, int] = {}
        self._timers = Deadlines(self._end, "scope-owners")

    def arrive(self, owner: str) -> None:
        """A stream of this client is open."""
        with self._lock:
            self._num_streams[owner] = self._num_streams.get(owner, 0) + 1
            self._timers.cancel(owner)

    def depart(self, owner: str, *, is_final: bool) -> None:
        """A stream of this client ended: for good, or it may come back."""
        with self._lock:
            self._num_streams[owner] -= 1
            if self._num_streams[owner]:
                return
            del self._num_streams[owner]
        if is_final:
            self._end(owner)
        else:
            self.expect(owner)

    def expect(self, owner: str) -> None:
        """Close the scopes of a client unless it is there, or comes within the grace period."""
        with self._lock:
            if owner in self._num_streams or owner in self._timers:
                return
            self._timers.set(owner, self.grace_s)

    def close(self) -> None:
        """Close nothing any more."""
        self._timers.close()

    def _end(self, owner: str) -> None:
        with self._lock:
            self._timers.cancel(owner)
            if owner in self._num_streams:
                return
        names = self._store.scopes.leave(owner)
        if names:
            log.warning("closed %d scope(s) of a client that is gone: %s", len(names), ", ".join(names)[:200])


def keep_open(
    node: "Node",
    context: fl.ServerCallContext,
    body: Mapping[str, Any],
    reader: fl.MetadataRecordBatchReader,
    writer: fl.MetadataRecordBatchWriter,
) -> None:
    """DoExchange `scopes`: the client named `owner` is there while this stream is. `{"end": true}` says it is done."""
    owner = take(body, "scopes", "owner", str)
    if not 16 <= len(owner) <= 128:
        raise BadRequestError(f"scopes.owner has {len(owner)} characters; wanted 16 to 128 that nobody else uses")
    is_final = False
    node.scope_owners.arrive(owner)
    try:
        writer.write_metadata(pa.py_buffer(dump({"node": node.node_id, "grace_s": node.scope_owners.grace_s})))
        while not is_final:
            with reading("a message of scopes"):
                chunk = reader.read_chunk()
            message = parse(chunk.app_metadata, "a message of scopes", SMALL_BODY_BYTES)
            is_final = take(message, "scopes", "end", bool, default=False)
    except StopIteration:
        is_final = False
    except pa.ArrowException as error:
        log.info("a client that keeps scopes open is gone (%s)", str(error).split(".")[0])
    finally:
        node.scope_owners.depart(owner, is_final=is_final)


def open_scope(node: "Node", body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `open_scope`: kept, or bound to the stream of `owner`."""
    name = check_plain_name(take(body, "open_scope", "name", str))
    quota_bytes = take(body, "open_scope", "quota_bytes", int, type(None), default=None)
    if quota_bytes is not None and quota_bytes <= 0:
        raise BadRequestError(f"open_scope.quota_bytes is {quota_bytes}; wanted more than 0, or none for no quota")
    is_kept = take(body, "open_scope", "keep", bool, default=False)
    owner = take(body, "open_scope", "owner", str, default="")
    if not owner and not is_kept:
        raise BadRequestError('open_scope without "owner" needs "keep": true; nobody would ever close it otherwise')
    node.store.scopes.open(name, quota_bytes, is_kept=is_kept, owner=owner)
    if owner:
        node.scope_owners.expect(owner)
    return {}


def close_scope(node: "Node", body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `close_scope`."""
    num_dropped, dropped_bytes = node.store.scopes.close(take(body, "close_scope", "name", str))
    return {"num_dropped": num_dropped, "dropped_bytes": dropped_bytes}


def move_to_scope(node: "Node", body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Action `move_to_scope`."""
    refs = take_refs(body, "move_to_scope")
    source = take(body, "move_to_scope", "source", str, type(None), default=None)
    deadline = time.monotonic() + take_timeout_s(body, "move_to_scope")
    gone = next((ref.name for ref in refs if ref.kind == "plain" and node.store.find(ref.name) is None), None)
    if gone is not None:
        raise MissingObjectError(
            f"{gone} is not on this node: a plain object is lost when it is released; put it again"
        )
    names = [ref.name for ref in refs]
    missing = node.store.scopes.move(names, take(body, "move_to_scope", "scope", str), deadline, source=source)
    return {"num_moved": len(names) - len(missing)}


def put_made_into_scope(node: "Node", made: Sequence[Ref | BadMedia], scope: str, deadline: float) -> None:
    """Put what was derived into a scope; what was evicted in between is made again."""
    refs = {item.name: item for item in made if isinstance(item, Ref)}
    missing = node.store.scopes.join(list(refs), scope, deadline)
    while missing:
        if time.monotonic() > deadline:
            raise MissingObjectError(
                f"{missing[0]} was made and evicted again before it was in scope {scope!r}: ask for fewer at once, or "
                "start the node with more --memory"
            )
        node.deriver.make_resident([refs[name] for name in missing], deadline)
        missing = node.store.scopes.join(missing, scope, deadline)
