"""Tests that a request beyond a node's limits gets an error that says so, and that the node continues."""

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, MissingObjectError, OverloadedError
from dataplane.core.json_body import MAX_ITEMS
from dataplane.server import flight_server, request_stream
from dataplane.server.call_limits import ByteBudget
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.serving import Served, refused, serving
from tests.dataplane.shards import wait_until


@pytest.fixture(scope="module")
def shared_narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node that allows one call, two streams, batches of 8 MiB and a hundred leases."""
    flags = ("--max-calls", "1", "--max-streams", "2", "--max-message", "8MiB", "--max-leases", "100")
    with serving(tmp_path_factory.mktemp("narrow") / "log", *flags, "--memory", "64MiB") as served:
        yield served


@pytest.fixture
def narrow(shared_narrow: Served) -> Served:
    """The node with low limits, after it has noticed that the calls and streams of the previous test have ended."""
    gc.collect()  # views in the frames of errors that were expected
    with Client(shared_narrow.uri, timeout_s=20) as client:
        wait_until(lambda: answers(client) and client.stat()["num_streams"] == client.stat()["num_leases"] == 0)
    return shared_narrow


def answers(client: Client) -> bool:
    """Return True if the node has room for a call."""
    try:
        return client.quarantine() == []
    except OverloadedError:
        return False


def test_a_call_too_many_is_refused_until_another_ends(narrow: Served) -> None:
    with Client(narrow.uri, timeout_s=20) as client, fl.FlightClient(narrow.uri) as flight:
        ref = client.put(np.zeros(32 << 20, np.uint8), name="big")
        stream = flight.do_get(client.ticket(ref))
        stream.read_chunk()
        with pytest.raises(OverloadedError, match=r"1 calls open, as many as it may; .* --max-calls"):
            client.quarantine()
        assert client.stat()["num_leases"] >= 1
        stream.read_all()
        del stream
        wait_until(lambda: answers(client))
        stream = flight.do_get(client.ticket(ref))
        stream.read_chunk()
        stream.cancel()
        wait_until(lambda: answers(client))
        client.release([ref])


def test_what_frees_memory_is_answered_while_puts_that_wait_for_it_hold_every_slot(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "log", "--max-calls", "1", "--memory", "64MiB") as node,
        Client(node.uri, timeout_s=20) as client,
        Reader(node.uri, timeout_s=20) as reader,
    ):
        client.open_scope("some")
        refs = [client.put(bytes(16 << 20), name=f"big/{at}", scope=None if at < 2 else "some") for at in range(4)]
        views = reader.resolve(refs[:1])
        with ThreadPoolExecutor(1) as threads, Client(node.uri, timeout_s=20) as other:
            ticket = {"name": "waits", "dtype": "uint8", "shape": [64 << 20], "timeout_s": 20}
            waiting = threads.submit(put, node.uri, ticket, bytes(64 << 20))
            wait_until(lambda: not answers(other))
            assert other.stat()["used_bytes"] == 64 << 20
            assert other.release(refs[:2]) == 2
            assert other.close_scope("some")["num_dropped"] == 2
            assert not waiting.done() and not answers(other)
            del views  # the reader ends its lease
            assert waiting.result(20)["shape"] == [64 << 20]
        client.release_names(["waits"])


def put(uri: str, descriptor: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Store an object over Flight, as any Flight client does, and return its ref."""
    batch = pa.record_batch({"data": np.frombuffer(data, np.uint8)})
    with fl.FlightClient(uri) as flight:
        command = fl.FlightDescriptor.for_command(json.dumps(descriptor).encode())
        writer, replies = flight.do_put(command, batch.schema)
        for start in range(0, len(data), 4 << 20):
            writer.write_batch(batch.slice(start, 4 << 20))
        writer.done_writing()
        reply = replies.read()
        writer.close()  # raises the error of a put that the node refused
        return dict(json.loads(reply.to_pybytes()))


def test_a_stream_too_many_is_refused_until_another_ends(narrow: Served) -> None:
    with Client(narrow.uri, timeout_s=20) as client:
        ref = client.put(b"some bytes", name="some")
        with Reader(narrow.uri, timeout_s=20) as reader:
            assert reader.resolve([ref])[0].tobytes() == b"some bytes"
            with pytest.raises(OverloadedError, match="2 streams open"):
                Reader(narrow.uri, timeout_s=20)
        wait_until(lambda: client.stat()["num_streams"] == 0)
        with Reader(narrow.uri, timeout_s=20) as reader:
            assert reader.resolve([ref])[0].tobytes() == b"some bytes"
        client.release([ref])


def test_leases_too_many_are_refused(narrow: Served) -> None:
    with Client(narrow.uri, timeout_s=20) as client, Reader(narrow.uri, timeout_s=20) as reader:
        ref = client.put(b"some bytes", name="some")
        views = reader.resolve([ref] * 60)
        with pytest.raises(OverloadedError, match=r"60 leases .* asked for 60 more, 100 .* --max-leases"):
            reader.resolve([ref] * 60)
        assert len(reader.resolve([ref] * 40)) == 40
        assert views[0].tobytes() == b"some bytes"
        client.release([ref])


def test_a_batch_too_big_is_refused_and_takes_no_room(narrow: Served) -> None:
    batch = pa.record_batch({"data": np.zeros(9 << 20, np.uint8)})
    with Client(narrow.uri, timeout_s=20) as client, fl.FlightClient(narrow.uri) as flight:
        used = client.stat()["used_bytes"]
        writer, answers = flight.do_put(fl.FlightDescriptor.for_path("big"), batch.schema)
        with pytest.raises(fl.FlightServerError, match="a batch of 9437184 bytes; wanted at most 8388608 a batch"):
            writer.write_batch(batch)
            writer.done_writing()
            answers.read()
            writer.close()
        wait_until(lambda: client.stat()["used_bytes"] <= used)


def test_a_request_for_too_many_names_is_refused(narrow: Served) -> None:
    with Client(narrow.uri, timeout_s=20) as client:
        with pytest.raises(BadRequestError, match=f"{MAX_ITEMS + 1} entries; wanted at most {MAX_ITEMS}"):
            client.samples("none", [0] * (MAX_ITEMS + 1))


@pytest.mark.parametrize(
    ("verb", "found"),
    [("stat", "wanted at most 65536: ask for less"), ("release", "commas and brackets; wanted at most")],
)
def test_a_body_that_would_take_many_times_its_size_is_refused_before_it_is_read(
    narrow: Served, verb: str, found: str
) -> None:
    body = b'{"names":[' + b"[]," * (10 << 20) + b"[]]}"
    with fl.FlightClient(narrow.uri) as flight, pytest.raises(fl.FlightServerError, match=found):
        list(flight.do_action(fl.Action(verb, body)))


def test_requests_that_are_being_answered_share_a_budget_of_bytes() -> None:
    budget = ByteBudget(100, 10)
    with budget.held(60):
        with budget.held(9):  # small ones are not counted
            with pytest.raises(OverloadedError, match="requests of 60 bytes and got one of 50 more, 100"):
                budget.take(50)
            with budget.held(40):
                pass
    with budget.held(100):
        pass


def test_limits_under_which_no_node_could_work_are_refused() -> None:
    assert "max-calls is 0; wanted at least 1" in refused("--max-calls", "0")
    assert "max-message is 1024" in refused("--max-message", "1KiB")


def test_the_requests_of_all_callers_of_a_node_are_in_that_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget(100_000, 1000)
    for module in (flight_server, request_stream):
        monkeypatch.setattr(module, "BODIES", budget)
    node = Node(NodeConfig(memory_bytes=1 << 20))
    try:
        with Client(node.uri, timeout_s=20) as client, Reader(node.uri, timeout_s=20) as reader:
            names = [f"{at}".zfill(500) for at in range(100)]
            refs = [replace(client.put(b"x", name="x"), name=name) for name in names]
            with budget.held(60_000):
                with pytest.raises(OverloadedError, match="requests of 60000 bytes and got one of"):
                    client.release_names(names)
                with pytest.raises(OverloadedError, match="requests of 60000 bytes and got one of"):
                    reader.resolve(refs)
            assert client.release_names(names) == 0
            with pytest.raises(MissingObjectError):
                reader.resolve(refs)
            wait_until(lambda: is_free(budget, 100_000))
    finally:
        node.stop()


def is_free(budget: ByteBudget, nbytes: int) -> bool:
    """Return True if so many bytes of the budget are free."""
    try:
        with budget.held(nbytes):
            return True
    except OverloadedError:
        return False
