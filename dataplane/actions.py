"""The DoAction verbs of a node: each takes a JSON body, calls the store, the datasets or the deriver, answers JSON."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataplane import infos, scope_owners
from dataplane.refs import Ref
from dataplane.rights import Right
from dataplane.security import Caller
from dataplane.wire import MAX_BODY_BYTES, SMALL_BODY_BYTES, take, take_list, take_refs, take_timeout_s

if TYPE_CHECKING:
    from dataplane.node import Node

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """A verb, what runs it, the right that it needs, and the line that ListActions shows."""

    run: Callable[["Node", Body, Caller], dict[str, Any]]
    right: Right
    text: str
    max_bytes: int = SMALL_BODY_BYTES
    """Of its body; those with lists may be long."""


def _stat(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    return node.stat()


def _release(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    return {"num_released": node.store.release(take_list(body, "release", "names", str))}


def _ingest(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    return node.datasets.ingest(take(body, "ingest", "dataset", str)).to_dict()


def _samples(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    indices = take_list(body, "samples", "indices", int)
    samples = node.datasets.samples(take(body, "samples", "dataset", str), indices)
    return {"samples": [sample.to_dict() for sample in samples]}


def _derive(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    deadline = time.monotonic() + take_timeout_s(body, "derive")
    refs = take_refs(body, "derive")
    scope = take(body, "derive", "scope", str, type(None), default=None)
    made = node.deriver.derive(refs, take(body, "derive", "recipe", dict), deadline)
    if scope is not None:
        scope_owners.put_made_into_scope(node, made, scope, deadline)
    return {"results": [{"ref": item.to_dict()} if isinstance(item, Ref) else {"bad": item.to_dict()} for item in made]}


def _prefetch(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    refs = take_refs(body, "prefetch")
    return {"num_taken": node.deriver.prefetch(refs, take(body, "prefetch", "recipe", dict))}


def _quarantine(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    return {"bad": [bad.to_dict() for bad in node.deriver.quarantine()]}


def _end_leases(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    leases = take_list(body, "end_leases", "leases", int)
    node.store.end_leases(leases, take(body, "end_leases", "session", str))
    return {}


def _bytes(node: "Node", body: Body, caller: Caller) -> dict[str, Any]:
    return node.byte_port.offer(caller) if node.byte_port is not None else {}


ACTIONS: Mapping[str, Action] = {
    "stat": Action(_stat, Right.READ, "{} -> counts and bytes"),
    "release": Action(_release, Right.WRITE, '{"names": [...]} -> {"num_released"}', MAX_BODY_BYTES),
    "ingest": Action(_ingest, Right.WRITE, '{"dataset"} -> the dataset and what is wrong with it'),
    "samples": Action(_samples, Right.READ, '{"dataset", "indices": [...]} -> {"samples"}', MAX_BODY_BYTES),
    "derive": Action(
        _derive, Right.WRITE, '{"refs": [...], "recipe": {...}, "scope"} -> refs or bad media', MAX_BODY_BYTES
    ),
    "prefetch": Action(_prefetch, Right.WRITE, '{"refs": [...], "recipe": {...}} -> {"num_taken"}', MAX_BODY_BYTES),
    "open_scope": Action(scope_owners.open_scope, Right.WRITE, '{"name", "quota_bytes", "keep", "owner"} -> {}'),
    "close_scope": Action(scope_owners.close_scope, Right.WRITE, '{"name"} -> {"num_dropped", "dropped_bytes"}'),
    "move_to_scope": Action(
        scope_owners.move_to_scope, Right.WRITE, '{"refs", "scope", "source"} -> {"num_moved"}', MAX_BODY_BYTES
    ),
    "quarantine": Action(_quarantine, Right.READ, '{} -> {"bad": bad media seen so far}'),
    "renew": Action(infos.renew, Right.READ, '{"lease", "lease_s"} -> {"expires"}: a lease of GetFlightInfo'),
    "bytes": Action(_bytes, Right.READ, '{} -> {"port", "key"} of a byte connection, or {} where there is none'),
    "end_leases": Action(_end_leases, Right.READ, '{"session", "leases": [...]} -> {}', MAX_BODY_BYTES),
}
