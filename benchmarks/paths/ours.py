"""The data plane: resolve, verified put, write and seal, and an object of another node.

`ours/resolve` ends with read-only numpy views of the node's shared memory: no bytes move. `ours/put` is
`Client.put_many`, verified by hash. `ours/write_seal` copies into the arena and publishes without a hash, as workers do
that make arrays.
`ours/cross_node` ends with the same views, of objects that another node has, which shares no memory with the reader's:
the reader's node fetches them over Flight into its own arena, and verifies them.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.paths.measuring import Case, Helper, Measured, helper, measure, requests
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.client.writer import WritableArray, Writer
from dataplane.core.process import keep_freed_memory
from dataplane.core.refs import ArraySpec, Ref

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A node of this host, a node that counts as another host's, and the process that puts objects into them."""

    uri: str
    pid: int
    far_uri: str
    far_pid: int
    producer: Helper


@contextmanager
def nodes(memory_bytes: int) -> Iterator[Nodes]:
    """Run two nodes and a producer during a `with` block; each node has `memory_bytes` of arena."""
    with (
        EmbeddedNode(memory_bytes=memory_bytes, roots={}, node_id="bench-far", host_id="elsewhere") as far,
        EmbeddedNode(memory_bytes=memory_bytes, roots={}, peers={"bench-far": far.uri}) as near,
        helper(produce) as producer,
    ):
        yield Nodes(uri=near.uri, pid=near.pid, far_uri=far.uri, far_pid=far.pid, producer=producer)


def produce(pipe: Connection) -> None:
    """Put the objects of a case into the node that the request names. This is the main function of the helper
    process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    for _, uri, case, prefix in requests(pipe):
        with Client(uri) as client:
            refs = [
                client.put(payload, name=f"{prefix}/{at}", shape=payload.shape)
                for at, payload in enumerate(case.payloads())
            ]
        pipe.send(refs)


def rows(nodes: Nodes, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Yield every row of the data plane for a case."""
    yield from resolved(nodes, case, quick=quick)
    yield put(nodes, case, quick=quick)
    yield written(nodes, case, quick=quick)
    yield crossed(nodes, case, quick=quick)


def resolved(nodes: Nodes, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure views of objects that another process put: all in one call, and the first alone (one round trip to the
    node)."""
    refs: list[Ref] = nodes.producer.ask("put", nodes.uri, case, f"bench/{next(_numbers)}")
    with Client(nodes.uri) as client, Reader(nodes.uri) as reader:
        yield measure("ours/resolve", case, lambda _: reader.resolve(refs), quick=quick)
        if case.count > 1:
            yield measure("ours/resolve", case.first(), lambda _: reader.resolve(refs[:1]), quick=quick)
        client.release(refs)


def put(nodes: Nodes, case: Case, *, quick: bool) -> Measured:
    """Measure putting all objects into the node with `put_many`, each under a new name."""
    payloads = case.payloads()
    with Client(nodes.uri) as client:

        def put_all(names: list[str]) -> list[Ref]:
            pairs = zip(names, payloads, strict=True)
            return client.put_many(
                [ArraySpec(name=name, dtype="uint8", shape=data.shape) for name, data in pairs], payloads
            )

        names = partial(_new_names, case)
        return measure("ours/put", case, put_all, prepare=names, clean=client.release_names, quick=quick)


def written(nodes: Nodes, case: Case, *, quick: bool) -> Measured:
    """Measure copying objects into slabs of the arena, and sealing all of them together."""
    payloads = case.payloads()
    with Client(nodes.uri) as client, Writer(nodes.uri) as writer:

        def write_all(names: list[str]) -> list[WritableArray]:
            pairs = zip(names, payloads, strict=True)
            specs = [ArraySpec(name=name, dtype="uint8", shape=data.shape) for name, data in pairs]
            with writer.create_many(specs) as places:
                for place, data in zip(places, payloads, strict=True):
                    np.copyto(place.array, data)
            return places

        names = partial(_new_names, case)
        return measure("ours/write_seal", case, write_all, prepare=names, clean=client.release_names, quick=quick)


def crossed(nodes: Nodes, case: Case, *, quick: bool) -> Measured:
    """Measure views of objects that the other node has and this reader's node has not."""
    with Client(nodes.far_uri) as far, Client(nodes.uri) as near, Reader(nodes.uri) as reader:

        def put_far() -> list[Ref]:
            return nodes.producer.ask("put", nodes.far_uri, case, f"bench/{next(_numbers)}")

        def release(refs: list[Ref]) -> None:
            near.release(refs)
            far.release(refs)

        return measure("ours/cross_node", case, reader.resolve, prepare=put_far, clean=release, quick=quick)


def _new_names(case: Case) -> list[str]:
    prefix = f"bench/{next(_numbers)}"
    return [f"{prefix}/{at}" for at in range(case.count)]
