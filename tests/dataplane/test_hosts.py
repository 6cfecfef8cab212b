"""Who shares memory with a node: whoever has its host id and can open its segment; everyone else copies."""

import numpy as np
import pytest

from dataplane.client import PUT_IN_PLACE_FROM, Client
from dataplane.embedded import EmbeddedNode
from dataplane.errors import BadRequestError
from dataplane.hosts import check_id, default_host_id
from dataplane.reader import Reader


def test_a_process_of_another_host_copies_over_flight_in_both_directions() -> None:
    array = np.random.default_rng(0).integers(0, 256, 2 * PUT_IN_PLACE_FROM, dtype=np.uint8)
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="a", host_id="elsewhere") as node:
        with Client(node.uri, timeout_s=30) as client, Reader(node.uri, timeout_s=30) as reader:
            ref = client.put(array, name="x")
            assert client._place_writer._is_remote and reader._session.address is None
            (view,) = reader.resolve([ref])
            assert np.array_equal(view, array) and not view.flags.writeable
            assert ref.node == client.stat()["node"] == "a"
            assert client.stat()["host"] == "elsewhere"


def test_a_process_that_was_given_the_hosts_id_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, host_id="elsewhere") as node:
        monkeypatch.setenv("DATAPLANE_HOST_ID", "elsewhere")
        with Reader(node.uri, timeout_s=30) as reader:
            assert reader._session.address is not None


def test_ids_are_short_words_without_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_id("node-1.rack_2", "node id") == "node-1.rack_2"
    for bad in ("", "../up", "a/b", ".hidden", "x" * 65, "ä", "a\n"):
        with pytest.raises(ValueError, match="node id is"):
            check_id(bad, "node id")
    with pytest.raises(BadRequestError, match="--node-id"):
        EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="a/b")
    monkeypatch.setenv("DATAPLANE_HOST_ID", "here")
    assert default_host_id() == "here"
