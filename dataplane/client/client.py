"""`Client`: all calls to a node that work with refs, samples and counts instead of pixels.

Controllers and the command line use it. This module imports neither PIL nor torch and maps no memory; processes that
compute with pixels resolve refs with `dataplane.client.reader`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import pyarrow.flight as fl

from dataplane.client.connect import Credentials, connect
from dataplane.client.flight_copy import call_options, get_copy, put_copy
from dataplane.client.inplace_put import InplacePut
from dataplane.client.put_batches import Buffer, Durable, as_bytes_view, batch_ranges, plain_body
from dataplane.client.retry import NodeRetry
from dataplane.client.scope_heartbeat import ScopeHeartbeat, weak_method
from dataplane.core.arrays import check_array
from dataplane.core.errors import MissingObjectError
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import MAX_ITEMS, dump, parse
from dataplane.core.refs import ArraySpec, BadMedia, Dataset, Ref, Sample

PUT_IN_PLACE_FROM = 256 * 1024
"""The size in bytes from which a client on the node's machine writes objects into the arena; smaller objects go over
Flight."""

log = logging.getLogger(__name__)


class Client:
    """The client of one node, at `uri`. It is thread-safe; asyncio code calls it through `asyncio.to_thread`.

    Every call ends within `timeout_s` seconds or raises NodeTimeoutError. The first call fails at once if no node
    replies. If a node replied before and then stops, each call waits up to `timeout_s` and is sent again to the node
    that starts on the same address; so the same call may arrive at a node twice. Objects without a lineage are lost
    when their node stops, unless they are durable.
    """

    def __init__(self, uri: str, *, timeout_s: float = 60.0, credentials: Credentials | None = None) -> None:
        self.uri = uri
        self.timeout_s = timeout_s
        self._flight = connect(uri, credentials)
        self._inplace_put = InplacePut(self._flight, uri, timeout_s, credentials)
        self._retry = NodeRetry(uri)
        self._heartbeat = ScopeHeartbeat(self._flight, uri, weak_method(self._act))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stat(self) -> dict[str, Any]:
        """Return counters of the node as a dictionary: used_bytes, budget_bytes, num_objects, num_leases, num_media and
        others."""
        return self._act("stat", {})

    def put(
        self,
        data: Buffer,
        *,
        name: str,
        dtype: str = "uint8",
        shape: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
        scope: str | None = None,
        durable: Durable = False,
    ) -> Ref:
        """Store a plain object and return its ref. `data` holds the bytes of an array of this dtype and shape.

        Without `shape` the array has one dimension. The object stays until it is released, or until the last scope that
        contains it closes. Storing the same content under the same name again returns the same object; other content is
        refused. The call waits up to `timeout_s` for free memory, and then raises OutOfSpaceError with the wanted, free
        and leased bytes. `durable` needs a node with --spill: the object is on the node's disk before this call
        returns, and survives a restart of the node. With "unsynced" it survives the death of the node's process, but
        perhaps not a failure of the machine, and the call waits for no disk.
        """
        view = as_bytes_view(data)
        spec = ArraySpec(name=name, dtype=dtype, shape=check_array(dtype, shape, view.nbytes), meta=meta or {})
        return self._put(view, plain_body(spec, view.nbytes, scope=scope, durable=durable))

    def put_many(
        self, specs: Sequence[ArraySpec], data: Sequence[Buffer], *, scope: str | None = None, durable: Durable = False
    ) -> list[Ref]:
        """Store many plain objects as `put` does, and return their refs. A few hundred objects take two round trips.

        If the call raises, the objects that were already stored stay; the same call, repeated, stores the rest.
        """
        views = [as_bytes_view(buffer) for buffer in data]
        bodies = [
            plain_body(spec, view.nbytes, scope=scope, durable=durable) for spec, view in zip(specs, views, strict=True)
        ]
        refs: list[Ref] = []
        for start, end in batch_ranges([view.nbytes for view in views]):
            refs += self._put_group(views[start:end], bodies[start:end], scope)
        return refs

    def put_source(
        self,
        data: Buffer,
        meta: Mapping[str, Any] | None = None,
        *,
        scope: str | None = None,
        durable: Durable = False,
    ) -> Ref:
        """Store an encoded medium under the digest of its bytes, and return its ref.

        The object stays until it is released, or until the last scope that contains it closes.
        """
        body = {"kind": "source", "meta": dict(meta or {}), "scope": scope, "durable": durable}
        return self._put(as_bytes_view(data), body)

    def open_scope(self, name: str, *, quota_bytes: int | None = None) -> None:
        """Open a scope: a named group of objects that end together. No object in a scope is evicted.

        The scope may hold up to `quota_bytes`; a put above the quota waits for room, then raises OutOfSpaceError. The
        scope closes with `close_scope`, with this client, or after the node has not heard from the client for half a
        minute. It stays open as long as one of the clients that opened it is there.
        """
        body = {"name": name, "quota_bytes": quota_bytes}
        self._retry.call("open_scope", lambda left_s: self._heartbeat.open(body, left_s), self.timeout_s)

    def close_scope(self, name: str) -> dict[str, int]:
        """Close a scope. Its plain objects are dropped unless another scope contains them.

        Returns `num_dropped` and `dropped_bytes`. Both are 0 for a scope of this client that the node does not know
        any more, because the node restarted or received this call twice.
        """
        was_ours = self._heartbeat.forget(name)  # first, so that the heartbeat does not open it again meanwhile
        num_tries = 0

        def attempt(left_s: float) -> dict[str, Any]:
            nonlocal num_tries
            num_tries += 1
            left_s = self._heartbeat.wait(left_s)
            try:
                return self._send("close_scope", {"name": name}, left_s)
            except fl.FlightServerError as error:
                is_missing = isinstance(from_flight(error, self.uri, "close_scope", left_s), MissingObjectError)
                if not is_missing or (num_tries == 1 and not was_ours):
                    raise
                return {"num_dropped": 0, "dropped_bytes": 0}  # an earlier attempt closed it, or the node lost it

        ended = self._retry.call("close_scope", attempt, self.timeout_s)
        return {"num_dropped": int(ended["num_dropped"]), "dropped_bytes": int(ended["dropped_bytes"])}

    def release(self, refs: Sequence[Ref]) -> int:
        """Drop plain objects, and mark other objects as the first to evict. Return how many the node held.

        The bytes of an object are freed when its last view is gone.
        """
        return self.release_names([ref.name for ref in refs])

    def release_names(self, names: Sequence[str]) -> int:
        """Release objects by name, as `release` does by ref. Return how many of the objects the node held."""
        runs = [list(names[start : start + MAX_ITEMS]) for start in range(0, len(names), MAX_ITEMS)]
        return sum(int(self._act("release", {"names": run})["num_released"]) for run in runs)

    def ingest(self, dataset: str) -> Dataset:
        """Index the shards of a registered data set, in any known format, and return its number of samples and its bad
        parts.

        Raises DatasetError if nothing in the data set is usable.
        """
        return Dataset.from_dict(self._act("ingest", {"dataset": dataset}))

    def samples(self, dataset: str, indices: Sequence[int]) -> list[Sample]:
        """Return the samples at these positions of a data set, with source refs of their media. No medium is decoded
        yet."""
        body = {"dataset": dataset, "indices": [int(index) for index in indices]}
        return [Sample.from_dict(item) for item in self._act("samples", body)["samples"]]

    def derive(
        self, refs: Sequence[Ref], recipe: Mapping[str, Any], *, scope: str | None = None
    ) -> list[Ref | BadMedia]:
        """Have the node make the derived object of each source, and return the derived refs in the same order.

        The result has a BadMedia in place of each medium that cannot be decoded. A derived ref in `refs` stands for its
        source. With `scope`, the derived objects are put into that open scope and are not evicted.
        """
        body = {"refs": [ref.to_dict() for ref in refs], "recipe": dict(recipe), "timeout_s": self.timeout_s}
        body["scope"] = scope
        results = self._act("derive", body)["results"]
        return [Ref.from_dict(item["ref"]) if "ref" in item else BadMedia.from_dict(item["bad"]) for item in results]

    def prepare(self, dataset: str, indices: Sequence[int], recipes: Mapping[str, Mapping[str, Any]]) -> list[Sample]:
        """Return the samples at these positions, with derived refs as their `media`, in one round trip.

        `recipes` has a recipe for each kind of media, such as `{"image": {...}, "video": {...}}`. A medium that cannot
        be decoded, or that has no recipe, is in `bad` instead. Each encoded medium of up to 16 MiB is read once.
        """
        body = _prepare_body(dataset, indices, recipes) | {"timeout_s": self.timeout_s}
        return [Sample.from_dict(item) for item in self._act("prepare", body)["samples"]]

    def prefetch(self, dataset: str, indices: Sequence[int], recipes: Mapping[str, Mapping[str, Any]]) -> int:
        """Ask the node to begin what a later `prepare` with the same arguments needs, in the background.

        The call waits only until the rows are read; the node first makes the objects for which a client waits. It
        returns n: the node accepted the first n samples, and the others did not fit into its queue. An object for which
        there is no room in memory later is made only when a client asks for it.
        """
        return int(self._act("prefetch", _prepare_body(dataset, indices, recipes))["num_taken"])

    def quarantine(self) -> list[BadMedia]:
        """Return the media that this node could not decode so far, each with the reason."""
        return [BadMedia.from_dict(item) for item in self._act("quarantine", {})["bad"]]

    def get(self, ref: Ref | str, *, on_bytes: Callable[[int, int | None], None] | None = None) -> bytes:
        """Return a copy of an object's bytes, sent over Flight. The command line uses this; it suits only small
        objects.

        With a Ref instead of a name, an evicted object is made again first. `on_bytes` is called with the number of
        bytes that have arrived, and with the total. Raises ChecksumError if the bytes do not match their digest.
        """
        ticket = self.ticket(ref)
        return self._retry.call("get", lambda left_s: get_copy(self._flight, ticket, left_s, on_bytes), self.timeout_s)

    def close(self) -> None:
        """Close the connection, and the scopes of this client."""
        self._heartbeat.close()
        self._inplace_put.close()
        self._flight.close()

    def ticket(self, ref: Ref | str) -> fl.Ticket:
        """Return the Flight ticket of an object, for a caller that makes its own DoGet."""
        body = {"name": ref} if isinstance(ref, str) else {"ref": ref.to_dict(), "timeout_s": self.timeout_s}
        return fl.Ticket(dump(body))

    def _put(self, view: memoryview, body: dict[str, Any]) -> Ref:
        """Store one object and return its ref. The client writes a big object into the arena if it can reach it; every
        other object goes over Flight."""

        def attempt(left_s: float) -> Ref:
            if body.get("scope") is not None:
                left_s = self._heartbeat.wait(left_s)
            request = body | {"nbytes": view.nbytes, "timeout_s": left_s}
            if view.nbytes >= PUT_IN_PLACE_FROM:
                refs = self._inplace_put.put([view], [request], request.get("scope"), left_s)
                if refs is not None:
                    return refs[0]
            return put_copy(self._flight, view, request, left_s)

        return self._retry.call("put", attempt, self.timeout_s)

    def _put_group(self, views: list[memoryview], bodies: list[dict[str, Any]], scope: str | None) -> list[Ref]:
        """Store a group of objects and return their refs. The client writes them into the arena if it can reach it;
        otherwise it sends one after the other."""

        def attempt(left_s: float) -> list[Ref] | None:
            if scope is not None:
                left_s = self._heartbeat.wait(left_s)
            sized = [body | {"nbytes": view.nbytes} for body, view in zip(bodies, views, strict=True)]
            return self._inplace_put.put(views, sized, scope, left_s)

        refs = self._retry.call("put", attempt, self.timeout_s)
        return [self._put(view, body) for view, body in zip(views, bodies, strict=True)] if refs is None else refs

    def _act(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run an action of the node and return its reply. The action is sent again if the node went away."""

        def attempt(left_s: float) -> dict[str, Any]:
            if body.get("scope") is not None:
                left_s = self._heartbeat.wait(left_s)
            return self._send(verb, {**body, "timeout_s": left_s} if "timeout_s" in body else body, left_s)

        return self._retry.call(verb, attempt, self.timeout_s)

    def _send(self, verb: str, body: Mapping[str, Any], left_s: float) -> dict[str, Any]:
        """Run an action once and return its reply."""
        results = list(self._flight.do_action(fl.Action(verb, dump(body)), call_options(left_s)))
        return parse(results[0].body, f"the reply to {verb}")


def _prepare_body(dataset: str, indices: Sequence[int], recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "indices": [int(index) for index in indices],
        "recipes": {kind: dict(recipe) for kind, recipe in recipes.items()},
    }
