"""Tests of puts that do not say how many bytes will come: they share a budget, and keep their deadlines."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from dataplane.client.client import Client
from dataplane.server import unannounced_put
from dataplane.server.call_limits import ByteBudget
from dataplane.server.unannounced_put import UnannouncedPut
from tests.dataplane.serving import Served, serving
from tests.dataplane.shards import wait_until

MIB = 1 << 20
BATCH = pa.record_batch({"data": pa.array(np.ones(MIB, np.uint8))})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("unannounced") / "log", "--memory", "64MiB") as started:
        yield started


def private_bytes(served: Served) -> int:
    """Return the resident private memory of the node's process."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


@contextmanager
def putting(uri: str, name: str, timeout_s: float, **body: object) -> Iterator[tuple[fl.FlightStreamWriter, object]]:
    with fl.FlightClient(uri) as flight:
        command = fl.FlightDescriptor.for_command(json.dumps({"name": name, "timeout_s": timeout_s} | body).encode())
        writer, answers = flight.do_put(command, BATCH.schema, fl.FlightCallOptions(timeout=60))
        yield writer, answers


def send(writer: fl.FlightStreamWriter, num_mib: int) -> None:
    for _ in range(num_mib):
        writer.write_batch(BATCH)


def ended(writer: fl.FlightStreamWriter, answers: object) -> dict[str, object]:
    writer.done_writing()
    reply = answers.read()  # type: ignore[attr-defined]
    writer.close()  # raises the error of a put that the node refused
    return json.loads(reply.to_pybytes())


def is_collected(served: Served, num_mib: int) -> bool:
    """Return True if a private mapping of 64 MiB, which is that of a put of unknown size, has that much memory.

    (A put that is tried to find out may take what the other one lacks. The node's segment is as big, and shared.)
    """
    smaps = Path(f"/proc/{served.process.pid}/smaps").read_text()
    private = re.findall(
        r"^\S+ rw-p \S+ 00:00 0 *\nSize: *(\d+) kB$.*?^Rss: *(\d+) kB$", smaps, re.MULTILINE | re.DOTALL
    )
    return any(64 <= int(size) >> 10 < 128 and int(rss) >> 10 >= num_mib for size, rss in private)


def test_puts_that_stop_take_no_more_than_the_nodes_size_together(served: Served) -> None:
    with Client(served.uri, timeout_s=20) as client:
        client.release([client.put(bytes(MIB), name="warm")])
        before = private_bytes(served)
        with (
            putting(served.uri, "one", 60) as (one, one_answers),
            putting(served.uri, "two", 60) as (two, two_answers),
            putting(served.uri, "three", 60) as (three, three_answers),
        ):
            send(one, 60)
            wait_until(lambda: is_collected(served, 60), timeout_s=20)
            assert private_bytes(served) > before + 58 * MIB
            for other, answers in ((two, two_answers), (three, three_answers)):
                with pytest.raises(fl.FlightError, match=r"puts of unknown size.* give nbytes"):
                    send(other, 60)
                    ended(other, answers)
            assert private_bytes(served) < before + (64 + 48) * MIB
            assert ended(one, one_answers)["nbytes"] == 60 * MIB
            assert not is_collected(served, 32)
        client.release_names(["one"])
        assert client.stat()["used_bytes"] == 0


def test_a_put_that_stops_gives_its_memory_back_at_its_deadline(served: Served) -> None:
    with Client(served.uri, timeout_s=20) as client:
        with putting(served.uri, "stops", 12) as (writer, answers):
            send(writer, 60)
            wait_until(lambda: is_collected(served, 60), timeout_s=10)
            collected = private_bytes(served)
            wait_until(lambda: not is_collected(served, 32))  # its client is still there
            wait_until(lambda: private_bytes(served) < collected - 32 * MIB)
            announced = client.put(bytes(40 * MIB), name="announced")
            with pytest.raises(fl.FlightError, match="62914560 bytes, and no end, at its deadline"):
                ended(writer, answers)
            client.release([announced])
        assert client.stat()["used_bytes"] == 0


def test_what_the_messages_of_a_put_took_goes_back_too_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[UnannouncedPut] = []
    put = UnannouncedPut(ByteBudget(MIB, 1), MIB)
    put.add(np.ones(MIB, np.uint8))
    monkeypatch.setattr(unannounced_put.TRIMMER, "request", lambda: asked.append(put))
    put.expire()
    assert asked == [put]


def test_a_put_of_unknown_size_waits_for_room_until_its_deadline_and_is_stored_if_it_comes(served: Served) -> None:
    with Client(served.uri, timeout_s=20) as client:
        big = client.put(bytes(50 * MIB), name="big")
        with putting(served.uri, "waits", 1.5) as (writer, answers):
            started = time.monotonic()
            send(writer, 30)
            with pytest.raises(fl.FlightError, match="no room for 30"):
                ended(writer, answers)
            assert 1 < time.monotonic() - started < 10
        with putting(served.uri, "waits", 20) as (writer, answers):
            send(writer, 30)
            client.release([big])
            assert ended(writer, answers)["shape"] == [30 * MIB]
        assert client.get("waits") == b"\1" * (30 * MIB)
        client.release_names(["waits"])


def test_one_put_of_unknown_size_may_be_as_big_as_the_node_and_not_bigger(served: Served) -> None:
    with Client(served.uri, timeout_s=20) as client:
        with putting(served.uri, "whole", 20) as (writer, answers):
            send(writer, 64)
            assert ended(writer, answers)["nbytes"] == 64 * MIB
        client.release_names(["whole"])
        with putting(served.uri, "more", 20) as (writer, answers):
            with pytest.raises(fl.FlightError, match="DoPut of more than 67108864 bytes"):
                send(writer, 65)
                ended(writer, answers)
        before = private_bytes(served)
        with putting(served.uri, "empty", 20) as (writer, answers):
            assert ended(writer, answers)["shape"] == [0]
        client.release_names(["empty"])
        assert not is_collected(served, 32)
        wait_until(lambda: private_bytes(served) < before + 24 * MIB)
