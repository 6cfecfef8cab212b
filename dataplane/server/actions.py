"""The actions of a node (named requests of DoAction): each takes a JSON body, calls the store, the datasets or the
deriver, and replies JSON."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dataplane.core.errors import BadRequestError
from dataplane.core.json_body import MAX_BODY_BYTES, SMALL_BODY_BYTES, take, take_list, take_refs, take_timeout_s
from dataplane.core.refs import Ref
from dataplane.core.rights import Right
from dataplane.derive.prepare import Recipes, prefetch, prepare
from dataplane.server import scope_actions
from dataplane.server.auth import Caller
from dataplane.server.services import Services

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """An action: its handler, the right that it needs, and the line that ListActions shows."""

    run: Callable[[Services, Body, Caller], dict[str, Any]]
    right: Right
    text: str
    max_bytes: int = SMALL_BODY_BYTES
    """The largest body in bytes. An action that takes lists needs a larger limit than others."""
    is_brief: bool = False
    """True if the action waits for nothing and frees memory, or tells how much there is. It has slots of its own,
    because calls that wait for memory may hold all others."""


def _stat(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    return services.stat()


def _release(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    return {"num_released": services.store.release(take_list(body, "release", "names", str))}


def _ingest(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    return services.datasets.ingest(take(body, "ingest", "dataset", str)).to_dict()


def _samples(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    indices = take_list(body, "samples", "indices", int)
    samples = services.datasets.samples(take(body, "samples", "dataset", str), indices)
    return {"samples": [sample.to_dict() for sample in samples]}


def _prepare(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    deadline = time.monotonic() + take_timeout_s(body, "prepare")
    samples = prepare(services.datasets, services.deriver, *_wanted_samples(body, "prepare"), deadline)
    return {"samples": [sample.to_dict() for sample in samples]}


def _derive(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    deadline = time.monotonic() + take_timeout_s(body, "derive")
    refs = take_refs(body, "derive")
    scope = take(body, "derive", "scope", str, type(None), default=None)
    made = services.deriver.derive(refs, take(body, "derive", "recipe", dict), deadline)
    if scope is not None:
        scope_actions.put_made_into_scope(services, made, scope, deadline)
    return {"results": [{"ref": item.to_dict()} if isinstance(item, Ref) else {"bad": item.to_dict()} for item in made]}


def _prefetch(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    return {"num_taken": prefetch(services.datasets, services.deriver, *_wanted_samples(body, "prefetch"))}


def _wanted_samples(body: Body, what: str) -> tuple[str, list[int], Recipes]:
    """Return the dataset, the indices and the recipes of a request."""
    recipes = take(body, what, "recipes", dict)
    for kind, recipe in recipes.items():
        if kind not in ("image", "video") or not isinstance(recipe, dict):
            raise BadRequestError(f"{what}.recipes has {kind!r}; wanted a recipe for each of: image, video")
    return take(body, what, "dataset", str), take_list(body, what, "indices", int), recipes


def _quarantine(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    return {"bad": [bad.to_dict() for bad in services.deriver.quarantine()]}


def _end_leases(services: Services, body: Body, caller: Caller) -> dict[str, Any]:
    leases = take_list(body, "end_leases", "leases", int)
    services.store.end_leases(leases, take(body, "end_leases", "session", str))
    return {}


ACTIONS: Mapping[str, Action] = {
    "stat": Action(_stat, Right.READ, "{} -> counts and bytes", is_brief=True),
    "release": Action(_release, Right.WRITE, '{"names": [...]} -> {"num_released"}', MAX_BODY_BYTES, is_brief=True),
    "ingest": Action(_ingest, Right.WRITE, '{"dataset"} -> the dataset and what is wrong with it'),
    "samples": Action(_samples, Right.READ, '{"dataset", "indices": [...]} -> {"samples"}', MAX_BODY_BYTES),
    "derive": Action(
        _derive, Right.WRITE, '{"refs": [...], "recipe": {...}, "scope"} -> refs or bad media', MAX_BODY_BYTES
    ),
    "prepare": Action(
        _prepare,
        Right.WRITE,
        '{"dataset", "indices": [...], "recipes": {"image": {...}}} -> {"samples"}, with derived refs',
        MAX_BODY_BYTES,
    ),
    "prefetch": Action(
        _prefetch,
        Right.WRITE,
        '{"dataset", "indices": [...], "recipes": {"image": {...}}} -> {"num_taken"}',
        MAX_BODY_BYTES,
    ),
    "open_scope": Action(scope_actions.open_scope, Right.WRITE, '{"name", "quota_bytes", "owner"} -> {}'),
    "close_scope": Action(
        scope_actions.close_scope, Right.WRITE, '{"name"} -> {"num_dropped", "dropped_bytes"}', is_brief=True
    ),
    "quarantine": Action(_quarantine, Right.READ, '{} -> {"bad": bad media seen so far}'),
    "end_leases": Action(_end_leases, Right.READ, '{"session", "leases": [...]} -> {}', MAX_BODY_BYTES, is_brief=True),
}
