"""Tests of DoGet with tickets of many objects and of ranges, from a plain Flight client."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.locators import MAX_JSON_OBJECTS
from dataplane.core.refs import ArraySpec, Ref
from tests.dataplane.serving import serving
from tests.dataplane.shards import wait_until


@pytest.fixture
def flight(node: EmbeddedNode) -> Iterator[fl.FlightClient]:
    with fl.FlightClient(node.uri) as opened:
        yield opened


def ticket(**body: Any) -> fl.Ticket:
    return fl.Ticket(json.dumps(body).encode())


def pieces(flight: fl.FlightClient, refs: list[Ref], **more: Any) -> tuple[dict[int, bytearray], dict[int, dict]]:
    """Return the bytes and the info of each object of a stream of many objects."""
    data: dict[int, bytearray] = {}
    infos: dict[int, dict] = {}
    for chunk in flight.do_get(ticket(refs=[ref.to_dict() for ref in refs], **more)):
        for row in chunk.data.to_pylist():
            if row["info"]:
                infos[row["object"]] = json.loads(row["info"])
            got = data.setdefault(row["object"], bytearray())
            assert row["start"] == len(got)
            got += row["data"]
    return data, infos


def test_one_stream_brings_many_objects_with_what_it_takes_to_verify_them(
    client: Client, flight: fl.FlightClient
) -> None:
    rng = np.random.default_rng(0)
    sizes = [0, 1, 100, 70_000, 130 << 10, (4 << 20) + 17, 5]
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    refs = [client.put(array, name=f"many/{at}") for at, array in enumerate(arrays)]
    data, infos = pieces(flight, refs)
    for at, array in enumerate(arrays):
        assert bytes(data[at]) == array.tobytes()
        assert infos[at]["checksum"] == content_digest(array)
        assert "ref" not in infos[at]  # it is the one that was asked for
    client.release(refs)


def test_a_node_loads_no_pandas_for_what_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow imports pandas for the first list that becomes an array, where it finds it."""
    loaded = tmp_path / "loaded"
    (tmp_path / "pandas.py").write_text(f"open({str(loaded)!r}, 'w')\nraise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(tmp_path / "log") as served, Client(served.uri) as client:
        specs = [ArraySpec(name=f"small/{at}", dtype="uint8", shape=(1,)) for at in range(MAX_JSON_OBJECTS + 1)]
        refs = client.put_many(specs, [b"x"] * len(specs))
        with fl.FlightClient(served.uri) as flight, Reader(served.uri) as reader:
            assert len(pieces(flight, refs)[0]) == len(reader.resolve(refs)) == len(specs)  # both in record batches
    assert not loaded.exists()


def test_a_missing_object_in_a_stream_of_many_does_not_keep_the_others(client: Client, flight: fl.FlightClient) -> None:
    refs = [client.put(np.full(10, at, np.uint8), name=f"gap/{at}") for at in range(3)]
    client.release([refs[1]])
    data, infos = pieces(flight, refs, timeout_s=5)
    assert infos[1]["error"] == "MissingObjectError" and "gap/1" in infos[1]["message"]
    assert (bytes(data[0]), bytes(data[2])) == (b"\x00" * 10, b"\x02" * 10)
    client.release(refs)


def test_a_stream_of_many_makes_what_was_evicted_unless_it_is_told_not_to(
    client: Client, flight: fl.FlightClient
) -> None:
    client.ingest("good")
    sources = [sample.media[0] for sample in client.samples("good", [1, 2])]
    _, infos = pieces(flight, sources, make=False)
    assert [infos[at]["error"] for at in (0, 1)] == ["MissingObjectError"] * 2
    data, infos = pieces(flight, sources)
    assert ["s/" + content_digest(data[at]) for at in (0, 1)] == [ref.name for ref in sources]


def test_a_range_of_an_object_is_its_bytes_and_says_what_the_whole_is(client: Client, flight: fl.FlightClient) -> None:
    array = np.random.default_rng(1).integers(0, 256, 5 << 20, dtype=np.uint8)
    ref = client.put(array, name="range/one")
    stream = flight.do_get(ticket(ref=ref.to_dict(), start=1000, length=(4 << 20) + 3))
    assert stream.schema.metadata[b"nbytes"] == b"5242880"
    assert stream.schema.metadata[b"checksum"].decode() == content_digest(array)
    found = stream.read_all().column("data").to_numpy()
    assert np.array_equal(found, array[1000 : 1000 + (4 << 20) + 3])
    for span in ({"start": -1}, {"start": 0, "length": (5 << 20) + 1}, {"start": 6 << 20}, {"length": -5}):
        with pytest.raises(fl.FlightServerError, match="wanted a range inside it"):
            flight.do_get(ticket(ref=ref.to_dict(), **span)).read_all()
    client.release([ref])


def test_streams_leave_no_lease_behind(client: Client, flight: fl.FlightClient) -> None:
    refs = [client.put(np.zeros(1 << 20, np.uint8), name=f"leaseless/{at}") for at in range(4)]
    pieces(flight, refs)
    half = flight.do_get(ticket(refs=[ref.to_dict() for ref in refs]))
    half.read_chunk()
    half.cancel()
    deadline = time.monotonic() + 20
    while client.stat()["num_leases"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.stat()["num_leases"] == 0
    client.release(refs)


def test_an_object_that_is_another_than_its_ref_claims_keeps_no_lease_on_those_sent_with_it(
    client: Client, flight: fl.FlightClient
) -> None:
    refs = [client.put(np.zeros(1 << 16, np.uint8), name=f"claimed/{at}") for at in range(2)]
    _, infos = pieces(flight, [refs[0], replace(refs[1], version=refs[1].version + 1)])
    assert infos[1]["error"] == "ChecksumError" and "error" not in infos[0]
    wait_until(lambda: client.stat()["num_leases"] == 0, timeout_s=10)
    client.release(refs)


def test_a_node_says_who_it_is_and_where(client: Client, flight: fl.FlightClient) -> None:
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "session"}'))
    hello = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    writer.close()
    stat = client.stat()
    assert {"node", "incarnation", "host", "segments"} <= set(hello)
    assert [hello[key] for key in ("node", "incarnation", "host")] == [
        stat[key] for key in ("node", "incarnation", "host")
    ]
