"""Tests that a request which makes no sense gets a Flight error that says so, and that the node stays up."""

import contextlib
import json
import re

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.shards import RECIPE, wait_until


@pytest.fixture
def flight(node: EmbeddedNode) -> fl.FlightClient:
    return fl.FlightClient(node.uri)


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("explode", b"{}", "action 'explode' is unknown; wanted one of stat"),
        ("release", b"\x80\x04\x95", "the body of release is not JSON"),
        ("release", b"[1]", "is a JSON list; wanted an object"),
        ("release", b"{}", "release has no 'names'; found nothing"),
        ("release", b'{"names": "x"}', r"release.names is 'x' \(str\); wanted list"),
        ("release", b'{"names": [1]}', "items that are not strings"),
        ("ingest", b'{"dataset": "../etc"}', "'../etc' is not registered"),
        ("samples", b'{"dataset": "good", "indices": [true]}', "items that are not whole numbers"),
        ("samples", b'{"dataset": "good", "indices": [99]}', "sample 99 of dataset 'good'; wanted 0 to 15"),
        ("derive", b'{"refs": [{}], "recipe": {}}', "derive: ref.kind is missing"),
        ("derive", b'{"refs": [], "recipe": {"kernel": "x"}}', "recipe.kernel is 'x'"),
        ("derive", b'{"refs": [], "timeout_s": -1}', "timeout_s is -1"),
        ("derive", b"[" * 100_000, "is not JSON"),
        ("end_leases", b'{"session": "x"}', "end_leases has no 'leases'"),
        ("end_leases", b'{"session": "x", "leases": [5, []]}', "end_leases.leases holds items that are not whole"),
        ("end_leases", b'{"session": "x", "leases": [true]}', "end_leases.leases holds items that are not whole"),
    ],
)
def test_a_malformed_action_is_answered_with_what_was_wanted(
    flight: fl.FlightClient, client: Client, verb: str, body: bytes, message: str
) -> None:
    with pytest.raises(fl.FlightServerError, match=message):
        list(flight.do_action(fl.Action(verb, body)))
    assert client.stat()["num_leases"] == 0


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        (b"", "the ticket is not JSON"),
        (b"{}", "the ticket has no 'name'"),
        (b'{"name": 3}', "the ticket.name is '3'"),
        (b'{"name": "nope"}', "'nope' is not resident"),
        (b'{"ref": {"name": "x"}}', "ref.kind is missing"),
    ],
)
def test_a_malformed_ticket_is_answered(flight: fl.FlightClient, ticket: bytes, message: str) -> None:
    with pytest.raises(fl.FlightServerError, match=message):
        flight.do_get(fl.Ticket(ticket)).read_all()


@pytest.mark.parametrize(
    ("descriptor", "table", "message"),
    [
        ({"name": ""}, {"data": pa.array([1], pa.uint8())}, "wanted 1 to 512 printable"),
        ({"name": "d/x"}, {"data": pa.array([1], pa.uint8())}, "begins like a source or derived"),
        ({"name": "x", "kind": "derived"}, {"data": pa.array([1], pa.uint8())}, "put.kind is 'derived'"),
        (
            {"name": "x", "dtype": "object"},
            {"data": pa.array([1], pa.uint8())},
            "dtype is 'object'; wanted one of bool",
        ),
        ({"name": "x", "shape": [2, 2]}, {"data": pa.array([1], pa.uint8())}, "takes 4 bytes, found 1"),
        ({"name": "x", "shape": [0, 10**30]}, {"data": pa.array([], pa.uint8())}, "fit 64 bits"),
        ({"name": "x", "shape": [1] * 100}, {"data": pa.array([1], pa.uint8())}, "at most 32"),
        ({"name": "x", "nbytes": 5}, {"data": pa.array([1], pa.uint8())}, "announced 5 bytes and sent 1"),
        ({"name": "x", "nbytes": 1}, {"data": pa.array([1, 2], pa.uint8())}, "announced 1 bytes and sent more"),
        ({"name": "x", "checksum": "0" * 32}, {"data": pa.array([1], pa.uint8())}, "arrived with checksum"),
        ({"name": "x"}, {"a": pa.array([1]), "b": pa.array([1])}, r"2 columns \(a, b\); wanted exactly one"),
        ({"name": "x"}, {"data": pa.array(["text"])}, "a column of string; wanted numbers"),
        ({"name": "x"}, {"data": pa.array([1, None], pa.uint8())}, "1 nulls"),
        ({"name": "x", "meta": {"a": "b" * 70_000}}, {"data": pa.array([1], pa.uint8())}, "put.meta has 7"),
    ],
)
def test_a_malformed_put_is_answered_and_takes_no_room(
    flight: fl.FlightClient, client: Client, descriptor: dict[str, object], table: dict[str, pa.Array], message: str
) -> None:
    used = client.stat()["used_bytes"]
    data = pa.table(table)
    with pytest.raises(fl.FlightServerError, match=message):
        command = fl.FlightDescriptor.for_command(json.dumps(descriptor).encode())
        writer, answers = flight.do_put(command, data.schema)
        writer.write_table(data)
        writer.done_writing()
        answers.read()
        writer.close()
    assert client.stat()["used_bytes"] == used


@pytest.mark.parametrize(
    ("verb", "message", "error"),
    [
        (b"resolve", b"", "the descriptor of DoExchange is not JSON"),
        (b'{"verb": "fly"}', b"", "verb 'fly' of DoExchange is unknown; wanted one of session, resolve, put"),
        (b'{"verb": "resolve"}', b"no json", "resolve is not JSON"),
        (b'{"verb": "resolve"}', b'{"names": [1]}', "items that are not strings"),
        (b'{"verb": "resolve"}', b'{"refs": [1]}', "ref is int; wanted a JSON object"),
        (b'{"verb": "resolve", "session": "nope"}', b'{"names": ["x"]}', "session 'nope' is not open"),
        (b'{"verb": "resolve", "session": "node"}', b'{"names": ["x"]}', "session 'node' is not open"),
        (b'{"verb": "resolve"}', b'{"end": [1, []]}', "resolve.end holds items that are not whole numbers"),
    ],
)
def test_a_malformed_exchange_is_answered(
    flight: fl.FlightClient, client: Client, verb: bytes, message: bytes, error: str
) -> None:
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(verb))
    found = ""
    try:
        writer.write_metadata(pa.py_buffer(message))
        while True:
            chunk = reader.read_chunk()
            if chunk.app_metadata is not None and b'"error"' in chunk.app_metadata.to_pybytes():
                found = chunk.app_metadata.to_pybytes().decode()
                break
    except pa.ArrowException as raised:
        found = str(raised)
    assert re.search(error, found), found
    with contextlib.suppress(pa.ArrowException):
        writer.close()
    assert client.derive([], RECIPE) == []
    wait_until(lambda: client.stat()["num_readers"] == 0)


def test_a_put_stream_answers_malformed_requests_and_goes_on(flight: fl.FlightClient, client: Client) -> None:
    used = client.stat()["used_bytes"]
    writer, reader = flight.do_exchange(fl.FlightDescriptor.for_command(b'{"verb": "put"}'))
    reader.read_chunk()
    for request, answer in [
        ({"allocate": -1}, "put.allocate is -1"),
        ({"seal": {}}, "put has no 'allocate'"),
        ({"allocate": 100}, '"offset"'),
        ({"seal": {"name": "x", "shape": [3]}}, "takes 3 bytes, found 100"),
        ({"allocate": 100}, '"offset"'),
        ({"allocate": 100}, "second allocate"),
        ({"written": 1}, ""),
        ({"allocate": [60, 40]}, '"offset"'),
        ({"written": 101}, ""),
        ({"seal": [{}, {}]}, "put.written is 101 after 0; wanted no less, and at most 100"),
        ({"allocate": 100}, '"offset"'),
        ({"written": -1}, ""),
        ({"written": 50}, ""),
        ({"seal": {"name": "x"}}, "put.written is -1"),
        ({"allocate": 100}, '"offset"'),
        ({"written": "all"}, ""),
        ({"abort": True}, "put.written is 'all'"),
    ]:
        writer.write_metadata(pa.py_buffer(json.dumps(request).encode()))
        assert not answer or answer in reader.read_chunk().app_metadata.to_pybytes().decode()
    writer.close()
    assert client.stat()["used_bytes"] == used
