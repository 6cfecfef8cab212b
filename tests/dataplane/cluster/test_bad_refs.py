"""Tests that a ref with impossible numbers is an error to its sender, and that no other caller notices it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.refs import Ref
from dataplane.datasets.catalog import Catalog
from dataplane.derive.fetch_or_make import RemoteObjects
from dataplane.storage.arena import Segment
from dataplane.storage.store import Store
from tests.dataplane.shards import RECIPE, wait_until

IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"nbytes": -1},
    {"nbytes": -(1 << 62)},
    {"nbytes": 1 << 62},
    {"nbytes": 1 << 64},
    {"nbytes": 10**300},
    {"nbytes": -1, "shape": []},
    {"shape": [3, 3]},
    {"shape": [1 << 62, 1 << 62]},
    {"shape": [1 << 62], "nbytes": 1 << 62, "dtype": "float64"},
    {"dtype": "object"},
    {"dtype": ""},
    {"version": -1},
    {"version": 1 << 63},
)
"""Changes of a ref of 1000 bytes after which it can be the ref of no object."""
LINEAGES: tuple[dict[str, Any], ...] = (
    {"nbytes": -1},
    {"nbytes": 1 << 63},
    {"offset": -(1 << 40)},
    {"offset": 1 << 200},
)


@pytest.fixture(scope="module")
def home(shard_dir: Path) -> Iterator[EmbeddedNode]:
    """Node `a`, which has the datasets."""
    roots = {"good": [f"{shard_dir}/good-*.tar"]}
    with EmbeddedNode(memory_bytes=32 << 20, roots=roots, node_id="a", host_id="elsewhere") as started:
        yield started


@pytest.fixture(scope="module")
def away(home: EmbeddedNode) -> Iterator[EmbeddedNode]:
    """Node `b`, which fetches from node `a`."""
    with EmbeddedNode(memory_bytes=32 << 20, roots={}, node_id="b", peers={"a": home.uri}) as started:
        yield started


def answers(uri: str, ref: dict[str, Any]) -> Iterator[str]:
    """Yield what a node says to a request with this ref, for each way in which a ref can be sent."""
    with fl.FlightClient(uri) as flight:
        for ticket in ({"ref": ref, "timeout_s": 5}, {"ref": ref, "local": True}):
            yield raised_by(lambda body=ticket: flight.do_get(fl.Ticket(json.dumps(body).encode())).read_all())
        for ticket in ({"refs": [ref], "timeout_s": 5}, {"refs": [ref], "local": True, "make": False}):
            yield raised_by(lambda body=ticket: flight.do_get(fl.Ticket(json.dumps(body).encode())).read_all())
        info = fl.FlightDescriptor.for_command(json.dumps({"ref": ref, "timeout_s": 5}).encode())
        yield raised_by(lambda: flight.get_flight_info(info))
        body = {"refs": [ref], "recipe": RECIPE, "timeout_s": 5}
        yield raised_by(lambda: list(flight.do_action(fl.Action("derive", json.dumps(body).encode()))))
        yield raised_by(lambda: resolve(flight, ref))


def resolve(flight: fl.FlightClient, ref: dict[str, Any]) -> None:
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "resolve"}'))
    writer.write_metadata(pa.py_buffer(json.dumps({"refs": [ref], "timeout_s": 5}).encode()))
    reader.read_chunk()  # what the node says of itself
    said = reader.read_chunk().app_metadata
    writer.close()
    if said is not None and b'"error"' in said.to_pybytes():
        raise fl.FlightServerError(said.to_pybytes().decode())


def raised_by(call) -> str:  # type: ignore[no-untyped-def]
    try:
        call()
    except pa.ArrowException as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_a_ref_with_impossible_numbers_is_its_senders_error_alone(
    home: EmbeddedNode, away: EmbeddedNode, change: dict[str, Any]
) -> None:
    field = next(iter(change))
    with Client(home.uri, timeout_s=10) as owner, Reader(away.uri, timeout_s=10) as reader:
        ref = owner.put(np.arange(1000, dtype=np.uint8), name="one")
        for text in answers(away.uri, ref.to_dict() | change):
            assert "ref" in text and field in text, text
        started = time.monotonic()
        assert np.array_equal(reader.resolve([ref])[0], np.arange(1000, dtype=np.uint8))
        assert time.monotonic() - started < 5
        owner.release([ref])
    with Client(away.uri, timeout_s=10) as other:
        other.release([ref])


@pytest.mark.parametrize("change", LINEAGES, ids=str)
def test_a_lineage_with_impossible_numbers_is_its_senders_error_alone(
    home: EmbeddedNode, away: EmbeddedNode, change: dict[str, Any]
) -> None:
    with Client(home.uri, timeout_s=10) as owner, Reader(away.uri, timeout_s=10) as reader:
        source = owner.samples("good", [0])[0].media[0]
        sent = source.to_dict()
        for text in answers(away.uri, sent | {"lineage": sent["lineage"] | change}):
            assert f"lineage.{next(iter(change))}" in text, text
        assert len(reader.resolve([source])[0]) == source.nbytes
        owner.release([source])
    with Client(away.uri, timeout_s=10) as other:
        other.release([source])
        wait_until(lambda: other.stat()["num_leases"] == 0)


def test_a_fetch_that_cannot_begin_is_an_error_and_the_next_caller_begins_another() -> None:
    segment = Segment(1 << 20, "b")
    store = Store(segment)
    peers = PeerDirectory("b", {"a": "grpc://127.0.0.1:1"}, None)
    fetcher = PeerFetcher(store, peers)
    try:
        remote = RemoteObjects(store, Catalog({}, "b"), peers, fetcher, lambda ref, deadline: pytest.fail("made"))
        fetcher.close()  # from now on it takes no work
        ref = Ref(name="one", kind="plain", dtype="uint8", shape=(9,), nbytes=9, node="a", lineage=None)
        for _ in range(2):
            ((future, is_own),) = remote.start([ref], time.monotonic() + 5)
            assert is_own
            with pytest.raises(RuntimeError, match="after shutdown"):
                future.result(5)
    finally:
        store.close()
        segment.unlink()
