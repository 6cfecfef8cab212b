"""The data plane: resolve, verified put, write and seal, and an object of another node.

`ours/resolve` ends with read-only numpy views of the node's shared memory: no bytes move. `ours/put` is `Client.put`,
which hashes. `ours/write_seal` copies into the arena and publishes without a hash. `ours/cross_node` resolves through a
node that shares no memory with the one that has the objects: it fetches them over Flight into its own arena first.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.paths.measuring import Case, Helper, Measured, helper, measure, requests
from dataplane.client import Client
from dataplane.embedded import EmbeddedNode
from dataplane.process import keep_freed_memory
from dataplane.reader import Reader
from dataplane.refs import Ref

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A node, and the process that puts objects into it."""

    uri: str
    producer: Helper


@contextmanager
def nodes(memory_bytes: int) -> Iterator[Nodes]:
    """Nodes of our own for as long as the block runs."""
    with EmbeddedNode(memory_bytes=memory_bytes, roots={}) as node, helper(produce) as producer:
        yield Nodes(uri=node.uri, producer=producer)


def produce(pipe: Connection) -> None:
    """Body of the helper: puts the objects of a case into the node it is told."""
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
    """Everything that the data plane does with a case."""
    yield from resolved(nodes, case, quick=quick)
    yield put(nodes, case, quick=quick)


def resolved(nodes: Nodes, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Views of what another process put: all in one call, and the first alone (one round trip to the node)."""
    refs: list[Ref] = nodes.producer.ask("put", nodes.uri, case, f"bench/{next(_numbers)}")
    with Client(nodes.uri) as client, Reader(nodes.uri) as reader:
        yield measure("ours/resolve", case, lambda _: reader.resolve(refs), quick=quick)
        if case.count > 1:
            yield measure("ours/resolve", case.first(), lambda _: reader.resolve(refs[:1]), quick=quick)
        client.release(refs)


def put(nodes: Nodes, case: Case, *, quick: bool) -> Measured:
    """Objects one after the other into the node, each under a new name."""
    payloads = case.payloads()
    with Client(nodes.uri) as client:

        def names() -> list[str]:
            return [f"bench/{next(_numbers)}" for _ in payloads]

        def put_all(names: list[str]) -> list[Ref]:
            return [client.put(data, name=name, shape=data.shape) for name, data in zip(names, payloads, strict=True)]

        return measure("ours/put", case, put_all, prepare=names, clean=client.release_names, quick=quick)
