"""Tests of GetFlightInfo, ListFlights and GetSchema, as a Flight client of any language sees them."""

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.shards import RECIPE, wait_until


@pytest.fixture
def flight(node: EmbeddedNode) -> Iterator[fl.FlightClient]:
    with fl.FlightClient(node.uri) as opened:
        yield opened


def info_of(flight: fl.FlightClient, **body: object) -> fl.FlightInfo:
    return flight.get_flight_info(fl.FlightDescriptor.for_command(json.dumps(body).encode()))


def test_an_info_leads_to_the_bytes_and_leases_nothing(client: Client, flight: fl.FlightClient) -> None:
    ref = client.put(np.arange(100, dtype=np.float32), name="info/one", dtype="float32")
    info = flight.get_flight_info(fl.FlightDescriptor.for_path("info/one"))
    assert (info.total_bytes, info.total_records) == (400, 400) and info.schema.metadata[b"dtype"] == b"float32"
    (endpoint,) = info.endpoints
    assert [str(location.uri, "ascii") for location in endpoint.locations] == [client.uri]
    assert client.stat()["num_leases"] == 0
    data = flight.do_get(endpoint.ticket).read_all()["data"].combine_chunks().to_numpy()
    assert (data.view(np.float32) == np.arange(100)).all()
    del data
    client.release([ref])
    with pytest.raises(fl.FlightServerError, match="plain object is lost when it is released"):
        flight.do_get(endpoint.ticket).read_all()


def test_a_derived_object_that_was_evicted_is_made_again_for_its_ticket(
    client: Client, flight: fl.FlightClient
) -> None:
    sources = [sample.media[0] for sample in client.samples("good", list(range(client.ingest("good").num_samples)))]
    made = client.derive(sources[:1], RECIPE)[0]
    info = info_of(flight, ref=made.to_dict())
    endpoint = info.endpoints[0]
    data = flight.do_get(endpoint.ticket).read_all()["data"].combine_chunks().to_numpy()
    assert data.nbytes == info.total_bytes == made.nbytes
    filler = client.put(np.zeros(client.stat()["budget_bytes"], np.uint8), name="filler")  # evicts all others
    client.release([filler])
    assert made.name not in {found.descriptor.path[0].decode() for found in flight.list_flights(b"d/")}
    again = flight.do_get(endpoint.ticket).read_all()["data"].combine_chunks().to_numpy()
    assert (again == data).all()


def test_schemas_and_lists_lease_nothing(client: Client, flight: fl.FlightClient) -> None:
    refs = [client.put(np.arange(at + 1, dtype=np.int16), name=f"list/{at}", dtype="int16") for at in range(5)]
    schema = flight.get_schema(fl.FlightDescriptor.for_path("list/3")).schema
    assert schema.field("data").type == pa.uint8() and json.loads(schema.metadata[b"shape"]) == [4]
    listed = list(flight.list_flights(b"list/"))
    assert sorted(info.descriptor.path[0] for info in listed) == [f"list/{at}".encode() for at in range(5)]
    assert sum(info.total_bytes for info in listed) == 2 * (1 + 2 + 3 + 4 + 5)
    stream = flight.do_get(listed[0].endpoints[0].ticket)
    assert stream.schema.metadata[b"dtype"] == b"int16" and stream.read_all().num_rows
    del stream
    wait_until(lambda: client.stat()["num_leases"] == 0)
    client.release(refs)


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        (fl.FlightDescriptor.for_path("nope"), "'nope' is not resident"),
        (fl.FlightDescriptor.for_path("a", "b"), "a path of 2 parts; wanted one"),
        (fl.FlightDescriptor.for_command(b"junk"), "the descriptor is not JSON"),
        (fl.FlightDescriptor.for_command(b"{}"), "the descriptor has no 'name'"),
        (fl.FlightDescriptor.for_command(b'{"ref": {"name": "x"}}'), "ref.kind is missing"),
    ],
)
def test_a_descriptor_that_makes_no_sense_is_answered(
    client: Client, flight: fl.FlightClient, descriptor: fl.FlightDescriptor, message: str
) -> None:
    with pytest.raises(fl.FlightServerError, match=message):
        flight.get_flight_info(descriptor)
    assert client.stat()["num_leases"] == 0
