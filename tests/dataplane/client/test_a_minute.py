"""Tests that wait as long as gRPC itself does before it closes the connection of a process that stands still: about a
minute. `test_standing_still.py` has the same in seconds, with a proxy that breaks the connection."""

import time
from contextlib import suppress

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.client.writer import Writer
from dataplane.core.errors import DataPlaneError, NodeUnavailableError
from tests.dataplane.client.standing import NBYTES, PUTTER, READER, WRITER, fill, standing, stop, wake
from tests.dataplane.shards import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.faults]

MEMORY = 8 << 20
STILL_S = 70.0


def test_clients_that_stood_still_for_more_than_a_minute_see_and_damage_nothing() -> None:
    with EmbeddedNode(memory_bytes=MEMORY, roots={}) as node, Client(node.uri, timeout_s=30) as client:
        with (
            Reader(node.uri) as reader,
            standing(READER, node.uri, node.uri) as reading,
            standing(WRITER, node.uri, node.uri) as writing,
            standing(PUTTER, node.uri, node.uri) as putting,
        ):
            all_three = (reading, writing, putting)
            for process in all_three:
                stop(process.pid)
            client.release_names([f"kept/{at}" for at in range(4)])
            started, turn = time.monotonic(), 0
            while time.monotonic() - started < STILL_S:
                client.release(fill(client, str(turn)))
                turn += 1
                time.sleep(0.2)
            refs = fill(client)
            views = reader.resolve(refs)
            assert len(refs) == 32 - 12 and client.stat()["num_standing_still"] == 3
            assert client.stat()["streams"]["session"] < 5, "gRPC closes connections after a minute"
            for process in all_three:
                wake(process.pid)
                process.go_on()
            assert reading.line() == str([[0], [1], [2], [3]])
            assert writing.line() in ("NodeUnavailableError", "sealed"), "it depends on whose connection was closed"
            assert all((view == 255).all() for view in views)
            del views
            client.release(refs)
            assert putting.line() == "half" and reading.line() == str(b"again")
            assert (reader.resolve([client.put(bytes([9]) * (4 * NBYTES), name="half")])[0] == 9).all()
            client.release_names(["half", "again"])
            wait_until(lambda: client.stat()["used_bytes"] == 0)


def test_clients_of_a_node_that_stood_still_for_more_than_a_minute_see_and_damage_nothing() -> None:
    with EmbeddedNode(memory_bytes=MEMORY, roots={}) as node, Client(node.uri, timeout_s=60) as client:
        with Reader(node.uri, timeout_s=60) as reader, Writer(node.uri, timeout_s=60) as writer:
            refs = [client.put(bytes([at]) * NBYTES, name=f"{at}") for at in range(4)]
            views = reader.resolve(refs)
            with suppress(NodeUnavailableError), writer.create("half", "uint8", (4 * NBYTES,)) as place:
                place.array[: 2 * NBYTES] = 9
                stop(node.pid)
                started = time.monotonic()
                client.timeout_s = reader.timeout_s = 1.0
                while time.monotonic() - started < STILL_S:
                    with suppress(DataPlaneError):
                        reader.resolve(refs)
                wake(node.pid)
                client.timeout_s = reader.timeout_s = 60.0
                client.release(refs)
                filled = fill(client)
                others = reader.resolve(filled)
                assert len(filled) == 32 - 8
                place.array[:] = 9
            assert [set(view.tolist()) for view in views] == [{0}, {1}, {2}, {3}]
            assert all((view == 255).all() for view in others)
            del views, others
            client.release(filled)
            client.release_names(["half"])
            wait_until(lambda: client.stat()["used_bytes"] == 0)
