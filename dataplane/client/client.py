"""The control client: refs, samples and counts go through here; pixels do not.

For controllers and people. It imports neither PIL nor torch and maps no memory; whoever computes on pixels resolves
refs with `dataplane.client.reader`. Thread-safe; from asyncio call it through `asyncio.to_thread`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials, connect
from dataplane.client.inplace_put import InplacePut
from dataplane.client.put_batches import Buffer, flat, groups, plain_body
from dataplane.client.retry import GRACE_S, NodeRetry
from dataplane.client.scope_heartbeat import ScopeHeartbeat, weak_method
from dataplane.core.digests import content_digest
from dataplane.core.errors import ChecksumError, MissingObjectError
from dataplane.core.flight_errors import from_flight
from dataplane.core.json_body import MAX_ITEMS, dump, parse
from dataplane.core.refs import ArraySpec, BadMedia, Dataset, Ref, Sample
from dataplane.core.schemas import BATCH_BYTES, check_array

PUT_IN_PLACE_FROM = 256 * 1024
"""From this size on a writer on the node's machine writes into the arena itself; smaller objects go over Flight."""

log = logging.getLogger(__name__)


class Client:
    """Talks to one node. Every call ends within `timeout_s` or raises NodeTimeoutError.

    The first call fails at once where no node answers. A node that answered before is waited for until `timeout_s`, and
    the call is sent again to its next incarnation on the same address: every verb may come twice. Objects without a
    lineage are gone with the old one unless they were durable.
    """

    def __init__(self, uri: str, *, timeout_s: float = 60.0, credentials: Credentials | None = None) -> None:
        self.uri = uri
        self.timeout_s = timeout_s
        self._flight = connect(uri, credentials)
        self._place_writer = InplacePut(self._flight, uri)
        self._patience = NodeRetry(uri)
        self._scope_keeper = ScopeHeartbeat(self._flight, uri, weak_method(self._act))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stat(self) -> dict[str, Any]:
        """Counts and bytes of the node: used_bytes, budget_bytes, num_objects, num_leases, num_media, ..."""
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
        durable: bool = False,
    ) -> Ref:
        """Store a plain object: the bytes of an array of this dtype and shape (flat if not given).

        It stays until released, or until the last scope closes that it is in. The same content under the same name is
        the same object again; other content is refused. Waits for room until `timeout_s`, then raises OutOfSpaceError
        with what was wanted, free and leased. `durable` needs a node with --spill: the object is on its disk before
        this returns, and there again when the node is started again.
        """
        view = flat(data)
        spec = ArraySpec(name=name, dtype=dtype, shape=check_array(dtype, shape, view.nbytes), meta=meta or {})
        return self._put(view, plain_body(spec, view.nbytes, scope=scope, durable=durable))

    def put_many(
        self, specs: Sequence[ArraySpec], data: Sequence[Buffer], *, scope: str | None = None, durable: bool = False
    ) -> list[Ref]:
        """Store many plain objects as `put` does, a few hundred in two round trips.

        If it raises, those that were stored before stay; the same call again stores the rest.
        """
        views = [flat(one) for one in data]
        bodies = [
            plain_body(spec, view.nbytes, scope=scope, durable=durable) for spec, view in zip(specs, views, strict=True)
        ]
        refs: list[Ref] = []
        for start, end in groups([view.nbytes for view in views]):
            refs += self._put_group(views[start:end], bodies[start:end], scope)
        return refs

    def put_source(
        self,
        data: Buffer,
        meta: Mapping[str, Any] | None = None,
        *,
        scope: str | None = None,
        durable: bool = False,
    ) -> Ref:
        """Store encoded media under the digest of its bytes; it stays until released, or until its scope closes."""
        body = {"kind": "source", "meta": dict(meta or {}), "scope": scope, "durable": durable}
        return self._put(flat(data), body)

    def open_scope(self, name: str, *, quota_bytes: int | None = None, keep: bool = False) -> None:
        """Open a named group of objects that end together; nothing in it is evicted, and it holds `quota_bytes`.

        It closes with `close_scope`; unless `keep`, also when this client closes, or is gone for half a minute. A put
        over the quota waits for room, then raises OutOfSpaceError.
        """
        body = {"name": name, "quota_bytes": quota_bytes, "keep": keep}
        if keep:
            self._act("open_scope", body)
            return
        self._patience.call("open_scope", lambda left_s: self._scope_keeper.open(body, left_s), self.timeout_s)

    def close_scope(self, name: str) -> dict[str, int]:
        """Close a scope: its plain objects go unless another scope has them. Gives num_dropped and dropped_bytes.

        Both are 0 for a scope of this client that the node does not know any more: it died, or was asked twice.
        """
        was_ours = self._scope_keeper.forget(name)  # first: it must not be opened again behind our back
        num_tries = 0

        def attempt(left_s: float) -> dict[str, Any]:
            nonlocal num_tries
            num_tries += 1
            left_s = self._scope_keeper.wait(left_s)
            try:
                return self._send("close_scope", {"name": name}, left_s)
            except fl.FlightServerError as error:
                is_missing = isinstance(from_flight(error, self.uri, "close_scope", left_s), MissingObjectError)
                if not is_missing or (num_tries == 1 and not was_ours):
                    raise
                return {"num_dropped": 0, "dropped_bytes": 0}  # the try before closed it, or the node lost it

        ended = self._patience.call("close_scope", attempt, self.timeout_s)
        return {"num_dropped": int(ended["num_dropped"]), "dropped_bytes": int(ended["dropped_bytes"])}

    def move_to_scope(self, refs: Sequence[Ref], scope: str, *, source: str | None = None) -> int:
        """Put objects into a scope, all or none, and out of the scope `source`, or out of their hold without one.

        Returns how many moved: fewer than given where derived objects were evicted already (they can be made again).
        Raises MissingObjectError for a plain object that is gone. Waits for room in the quota.
        """
        body = {"refs": [ref.to_dict() for ref in refs], "scope": scope, "source": source, "timeout_s": self.timeout_s}
        return int(self._act("move_to_scope", body)["num_moved"])

    def release(self, refs: Sequence[Ref]) -> int:
        """Drop plain objects (their bytes go when the last view does) and let the others be evicted first.

        Returns how many of them the node held.
        """
        return self.release_names([ref.name for ref in refs])

    def release_names(self, names: Sequence[str]) -> int:
        """As `release`, where only the names are known."""
        runs = [list(names[start : start + MAX_ITEMS]) for start in range(0, len(names), MAX_ITEMS)]
        return sum(int(self._act("release", {"names": run})["num_released"]) for run in runs)

    def ingest(self, dataset: str) -> Dataset:
        """Index the shards of a registered dataset, whatever their format. Raises DatasetError if nothing is usable."""
        return Dataset.from_dict(self._act("ingest", {"dataset": dataset}))

    def samples(self, dataset: str, indices: Sequence[int]) -> list[Sample]:
        """The samples with these numbers, with source refs of their images; nothing is decoded yet."""
        body = {"dataset": dataset, "indices": [int(index) for index in indices]}
        return [Sample.from_dict(item) for item in self._act("samples", body)["samples"]]

    def derive(
        self, refs: Sequence[Ref], recipe: Mapping[str, Any], *, scope: str | None = None
    ) -> list[Ref | BadMedia]:
        """Have the node make what the recipe says of each source; BadMedia in the place of what cannot be decoded.

        A derived ref stands for its source. What is in an open scope is not evicted.
        """
        body = {"refs": [ref.to_dict() for ref in refs], "recipe": dict(recipe), "timeout_s": self.timeout_s}
        body["scope"] = scope
        results = self._act("derive", body)["results"]
        return [Ref.from_dict(item["ref"]) if "ref" in item else BadMedia.from_dict(item["bad"]) for item in results]

    def prefetch(self, refs: Sequence[Ref], recipe: Mapping[str, Any]) -> int:
        """Have the node begin with what the recipe makes of each source, for a `derive` that comes later.

        Waits for nothing; whatever somebody waits for is made first. Returns how many of the refs, from the first on,
        the node took: the rest did not fit its window. What then finds no room is left until it is asked for.
        """
        body = {"refs": [ref.to_dict() for ref in refs], "recipe": dict(recipe)}
        return int(self._act("prefetch", body)["num_taken"])

    def quarantine(self) -> list[BadMedia]:
        """Every medium that this node could not decode so far."""
        return [BadMedia.from_dict(item) for item in self._act("quarantine", {})["bad"]]

    def get(self, ref: Ref | str, *, on_bytes: Callable[[int, int | None], None] | None = None) -> bytes:
        """The bytes of an object, over Flight; of a whole ref also when it was evicted. For people and small things.

        `on_bytes` is told how many have arrived, of how many.
        """

        def attempt(left_s: float) -> bytes:
            reader = self._flight.do_get(self.ticket(ref), _options(left_s))
            total = int((reader.schema.metadata or {}).get(b"nbytes", 0))
            parts: list[memoryview] = []
            for chunk in reader:
                parts.append(memoryview(chunk.data.column(0).buffers()[1])[_span(chunk.data)])
                if on_bytes is not None:
                    on_bytes(sum(map(len, parts)), total)
            data = b"".join(parts)
            sent = (reader.schema.metadata or {}).get(b"checksum", b"").decode()
            if sent and content_digest(data) != sent:
                raise ChecksumError(f"{self.uri} sent other bytes, or fewer, than those of digest {sent}; ask again")
            return data

        return self._patience.call("get", attempt, self.timeout_s)

    def close(self) -> None:
        """Close the connection, and with it the scopes that are bound to it."""
        self._scope_keeper.close()
        self._place_writer.close()
        self._flight.close()

    def ticket(self, ref: Ref | str) -> fl.Ticket:
        """The ticket of an object for a DoGet of one's own."""
        body = {"name": ref} if isinstance(ref, str) else {"ref": ref.to_dict(), "timeout_s": self.timeout_s}
        return fl.Ticket(dump(body))

    def _put(self, view: memoryview, body: dict[str, Any]) -> Ref:
        def attempt(left_s: float) -> Ref:
            if body.get("scope") is not None:
                left_s = self._scope_keeper.wait(left_s)
            request = body | {"nbytes": view.nbytes, "timeout_s": left_s}
            if view.nbytes >= PUT_IN_PLACE_FROM:
                refs = self._place_writer.put([view], [request], request.get("scope"), left_s)
                if refs is not None:
                    return refs[0]
            return self._put_over_flight(view, request, left_s)

        return self._patience.call("put", attempt, self.timeout_s)

    def _put_group(self, views: list[memoryview], bodies: list[dict[str, Any]], scope: str | None) -> list[Ref]:
        def attempt(left_s: float) -> list[Ref] | None:
            if scope is not None:
                left_s = self._scope_keeper.wait(left_s)
            sized = [body | {"nbytes": view.nbytes} for body, view in zip(bodies, views, strict=True)]
            return self._place_writer.put(views, sized, scope, left_s)

        refs = self._patience.call("put", attempt, self.timeout_s)
        return [self._put(view, body) for view, body in zip(views, bodies, strict=True)] if refs is None else refs

    def _put_over_flight(self, view: memoryview, body: dict[str, Any], left_s: float) -> Ref:
        body = body | {"checksum": content_digest(view)}
        array = pa.Array.from_buffers(pa.uint8(), view.nbytes, [None, pa.py_buffer(view)])
        schema = pa.schema([("data", pa.uint8())])
        writer, answers = self._flight.do_put(fl.FlightDescriptor.for_command(dump(body)), schema, _options(left_s))
        with writer:
            for start in range(0, view.nbytes, BATCH_BYTES):
                writer.write_batch(pa.record_batch([array.slice(start, BATCH_BYTES)], schema=schema))
            writer.done_writing()
            answer = answers.read()
        return Ref.from_dict(parse(answer, "the answer to put"))

    def _act(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        def attempt(left_s: float) -> dict[str, Any]:
            if body.get("scope") is not None:
                left_s = self._scope_keeper.wait(left_s)
            return self._send(verb, {**body, "timeout_s": left_s} if "timeout_s" in body else body, left_s)

        return self._patience.call(verb, attempt, self.timeout_s)

    def _send(self, verb: str, body: Mapping[str, Any], left_s: float) -> dict[str, Any]:
        results = list(self._flight.do_action(fl.Action(verb, dump(body)), _options(left_s)))
        return parse(results[0].body, f"the answer to {verb}")


def _options(left_s: float) -> fl.FlightCallOptions:
    return fl.FlightCallOptions(timeout=left_s + GRACE_S)


def _span(batch: pa.RecordBatch) -> slice:
    column = batch.column(0)
    return slice(column.offset, column.offset + len(column))
