"""Tests with malformed requests that no Flight client would send: the node replies, stays up and keeps nothing."""

import re
from collections.abc import Iterator

import grpc
import pyarrow as pa
import pytest
from rich.console import Console

from benchmarks.fuzz import fuzz, known_of
from benchmarks.fuzzing import requests
from benchmarks.fuzzing.requests import Corpus, Known
from benchmarks.fuzzing.wire import SERVICE, action, command, flight_data, ipc_parts
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.server.actions import ACTIONS
from dataplane.server.do_exchange import EXCHANGES
from tests.dataplane.shards import RECIPE

SCHEMA, HEADER, BODY = ipc_parts(pa.record_batch([pa.array(range(64), pa.uint8())], names=["data"]))
NULLS = ipc_parts(pa.record_batch([pa.array([1, None] * 512, pa.uint8())], names=["data"]))
BAD_NAME = SCHEMA.replace(b"data", b"d\xf4\xf4a")
BAD_NAMES = ipc_parts(pa.record_batch({"colone": [1], "coltwo": [2]}))[0].replace(b"colone", b"c\xf4\xf4\xf4\xf4e")
SESSION = flight_data(command(b'{"verb": "session"}'))
PUT = command(b'{"name": "raw/x"}')


@pytest.fixture(scope="module")
def channel(node: EmbeddedNode) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(node.uri.removeprefix("grpc://"), options=[("grpc.enable_http_proxy", 0)]) as opened:
        yield opened


@pytest.mark.parametrize(
    ("method", "messages", "wanted"),
    [
        (
            "DoPut",
            [flight_data(PUT), flight_data(header=HEADER)],
            "the schema of DoPut is not Arrow IPC .*schema but got record batch",
        ),
        ("DoPut", [flight_data(PUT, BAD_NAMES)], "the schema of DoPut is not Arrow IPC .*can't decode byte"),
        ("DoPut", [flight_data(PUT, BAD_NAME), flight_data(header=HEADER, body=BODY)], "batch of DoPut .*can't decode"),
        ("DoPut", [flight_data(PUT, SCHEMA), flight_data(header=b"x" * 40)], "a batch of DoPut is not Arrow IPC"),
        ("DoPut", [flight_data(PUT, SCHEMA), flight_data(header=HEADER, body=BODY[:10])], "a batch of DoPut is not"),
        ("DoPut", [flight_data(PUT, NULLS[0]), flight_data(header=NULLS[1], body=b"")], "a batch of DoPut is not"),
        (
            "DoPut",
            [flight_data(command(b'{"name": "x", "nbytes": 1' + b"0" * 400 + b"}"), SCHEMA)],
            "put.nbytes is 1000",
        ),
        ("DoPut", [flight_data(command(b'{"name": "x", "shape": [9999999999, 9999999999]}'), SCHEMA)], "put.shape is"),
        ("DoPut", [flight_data(command(b'{"name": "x", "kind": "\\ud800"}'), SCHEMA)], "put.kind is"),
        ("DoExchange", [SESSION, flight_data(header=HEADER)], "session is not Arrow IPC"),
        ("DoExchange", [flight_data(command(b'{"verb": "put"}')), flight_data(header=b"\0")], "put is not Arrow IPC"),
        ("DoAction", [action("x" * 20_000, b"{}")], "^action 'xxx"),
        ("DoAction", [action("ingest", b'{"dataset": "\\ud800"}')], "is not registered"),
        ("DoAction", [action("ingest", b'{"dataset": "' + "\U0001f600".encode() * 5000 + b'"}')], "^dataset '"),
    ],
)
def test_what_no_client_library_would_send_is_answered(
    channel: grpc.Channel, method: str, messages: list[bytes], wanted: str
) -> None:
    call = channel.stream_stream(f"{SERVICE}{method}")
    with pytest.raises(grpc.RpcError) as raised:
        list(call(iter(messages), timeout=20))
    details = raised.value.details()
    assert raised.value.code() is grpc.StatusCode.UNKNOWN, details
    assert re.search(wanted, details), details


def test_the_same_seed_gives_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "NUM_STRUCTURES", 30)
    known = Known(actions={"stat": "{}", "release": '{"names"}'}, refs=[{"name": "d/x"}], recipe=RECIPE, dataset="good")
    one, two = Corpus(known, 7), Corpus(known, 7)
    assert [one.request(index) for index in range(20)] == [two.request(index) for index in range(20)]


def test_every_action_and_every_exchange_is_fuzzed(node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "NUM_STRUCTURES", 30)
    with Client(node.uri) as client:
        known = known_of(node.uri)
        corpus = Corpus(known, 0)
        sent = b"".join(message for index in range(2000) for message in corpus.request(index).messages)
        assert all(verb.encode() in sent for verb in (*known.actions, *EXCHANGES))
        assert known.actions.keys() == ACTIONS.keys() and requests.STREAMS.keys() == EXCHANGES.keys()
        assert all(key in sent for key in (b'"local": true', b'"make": false', b'"nbytes": -'))
        client.release_names(["fuzz/kept"])


def test_malformed_requests_leave_a_node_as_it_was() -> None:
    """Test a few; `benchmarks/fuzz.py` sends as many as one likes."""
    report = fuzz(200, 1, Console(stderr=True))
    assert report["findings"] == []
    assert report["num_requests"] == 200
