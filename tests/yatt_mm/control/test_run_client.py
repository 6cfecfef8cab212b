"""Tests of a controller's client of several nodes, which are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from yatt_mm.control.run_client import RunClient


@pytest.fixture
def nodes() -> Iterator[dict[str, EmbeddedNode]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(EmbeddedNode(memory_bytes=1 << 20, roots={}, node_id=name, restart=False))
            for name in "ab"
        }


def test_objects_are_released_where_they_are_and_counters_added_up(nodes: dict[str, EmbeddedNode]) -> None:
    uris = {name: node.uri for name, node in nodes.items()}
    clients = {name: Client(uri) for name, uri in uris.items()}
    refs = [clients[name].put(np.zeros(100, np.uint8), name=f"{name}{number}") for name in "ab" for number in range(2)]
    client = RunClient(uris["a"], uris, timeout_s=10.0)
    assert client.total(["num_objects"]) == {"num_objects": 4}
    assert client.release([refs[0], refs[2], refs[3]]) == 3
    assert clients["a"].stat()["num_objects"] == 1 and clients["b"].stat()["num_objects"] == 0
    nodes["b"].stop()
    assert client.release([refs[3], refs[1]]) == 1  # what was on b has ended with it
    for one in (client, *clients.values()):
        one.close()
