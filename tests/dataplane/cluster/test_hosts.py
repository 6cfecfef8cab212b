"""Tests of sharing memory with a node: a process with the node's host id that can open its segment shares it, and all
others copy."""

from dataclasses import replace

import numpy as np
import pytest

from dataplane.client.client import PUT_IN_PLACE_FROM, Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError, ChecksumError, MissingObjectError
from dataplane.core.hosts import check_id, default_host_id


def test_a_process_of_another_host_copies_over_flight_in_both_directions() -> None:
    array = np.random.default_rng(0).integers(0, 256, 2 * PUT_IN_PLACE_FROM, dtype=np.uint8)
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="a", host_id="elsewhere") as node:
        with Client(node.uri, timeout_s=30) as client, Reader(node.uri, timeout_s=30) as reader:
            ref = client.put(array, name="x")
            assert client._inplace_put._is_remote and reader.mapping() is None
            (view,) = reader.resolve([ref])
            assert np.array_equal(view, array) and not view.flags.writeable
            assert ref.node == client.stat()["node"] == "a"
            assert client.stat()["host"] == "elsewhere"


def test_a_process_that_was_given_the_hosts_id_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, host_id="elsewhere") as node:
        monkeypatch.setenv("DATAPLANE_HOST_ID", "elsewhere")
        with Reader(node.uri, timeout_s=30) as reader:
            assert reader.mapping() is not None


def test_ids_are_short_words_without_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_id("node-1.rack_2", "node id") == "node-1.rack_2"
    for bad in ("", "../up", "a/b", ".hidden", "x" * 65, "ä", "a\n"):
        with pytest.raises(ValueError, match="node id is"):
            check_id(bad, "node id")
    with pytest.raises(BadRequestError, match="--node-id"):
        EmbeddedNode(memory_bytes=4 << 20, roots={}, node_id="a/b")
    monkeypatch.setenv("DATAPLANE_HOST_ID", "here")
    assert default_host_id() == "here"


def test_a_reader_that_cannot_map_gets_many_and_big_objects_verified_and_one_missing_fails_all() -> None:
    rng = np.random.default_rng(1)
    sizes = [0, 3, 4096, 300 << 10, (17 << 20) + 12]
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    with EmbeddedNode(memory_bytes=32 << 20, roots={}, host_id="elsewhere") as node:
        with Client(node.uri, timeout_s=30) as client, Reader(node.uri, timeout_s=30) as reader:
            refs = [client.put(array, name=f"x/{at}") for at, array in enumerate(arrays)]
            floats = client.put(np.arange(6, dtype=np.float32), name="f", dtype="float32", shape=(2, 3))
            *views, table = reader.resolve([*refs, floats])
            assert all(np.array_equal(view, array) for view, array in zip(views, arrays, strict=True))
            assert table.tolist() == [[0, 1, 2], [3, 4, 5]] and not table.flags.writeable
            assert all(view.ctypes.data % 64 == 0 for view in views if view.nbytes)
            with pytest.raises(ChecksumError, match="get a fresh ref"):
                reader.resolve([replace(floats, shape=(3, 2))])
            client.release(refs[:1])
            with pytest.raises(MissingObjectError, match="x/0"):
                reader.resolve(refs)
            assert client.get(refs[3]) == arrays[3].tobytes()
