"""Tests of storing many objects in a few round trips."""

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.put_batches import GROUP_BYTES, GROUP_OBJECTS, batch_ranges
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest, source_name, version_of
from dataplane.core.errors import BadRequestError
from dataplane.core.json_body import MAX_ITEMS
from dataplane.core.refs import ArraySpec


def test_many_objects_are_those_that_single_puts_give(client: Client, reader: Reader) -> None:
    arrays = [np.arange(at * 7, dtype=np.int16).reshape(at, 7) for at in range(600)]
    specs = [ArraySpec(name=f"many/{at}", dtype="int16", shape=(at, 7), meta={"at": at}) for at in range(600)]
    refs = client.put_many(specs, arrays)
    assert [ref.meta["at"] for ref in refs] == list(range(600))
    assert all(np.array_equal(view, array) for view, array in zip(reader.resolve(refs), arrays, strict=True))
    assert refs[3] == client.put(arrays[3], name="many/3", dtype="int16", shape=(3, 7), meta={"at": 3})
    assert client.release(refs) == 600


def test_what_is_hashed_while_it_is_written_has_the_digest_of_the_whole() -> None:
    sizes = (0, 3, 300_000, 9 << 20, 0, 4 << 20, (4 << 20) - 1, 1, (5 << 20) + 7, 0)
    arrays = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    specs = [ArraySpec(name=f"hashed/{at}", dtype="uint8", shape=(size,)) for at, size in enumerate(sizes)]
    with EmbeddedNode(memory_bytes=64 << 20, roots={}) as node, Client(node.uri) as client:
        refs = client.put_many(specs, arrays)
        assert [ref.version for ref in refs] == [version_of(content_digest(array)) for array in arrays]
        source = client.put_source(arrays[3])
        assert source.name == source_name(content_digest(arrays[3]))
        with Reader(node.uri) as reader:
            views = reader.resolve([*refs, source])
            assert all(np.array_equal(view, array) for view, array in zip(views, [*arrays, arrays[3]], strict=True))
            del views


def test_many_objects_join_a_scope_and_end_with_it(client: Client) -> None:
    client.open_scope("many")
    client.put_many([ArraySpec(name=f"scoped/{at}", dtype="uint8", shape=(9,)) for at in range(5)], [bytes(9)] * 5)
    specs = [ArraySpec(name=f"many/{at}", dtype="uint8", shape=(9,)) for at in range(5)]
    client.put_many(specs, [bytes(9)] * 5, scope="many")
    assert client.close_scope("many")["num_dropped"] == 5
    assert client.release_names([f"scoped/{at}" for at in range(5)]) == 5


def test_bytes_that_are_not_what_their_spec_says_store_nothing(client: Client) -> None:
    before = client.stat()["num_objects"]
    specs = [ArraySpec(name=f"wrong/{at}", dtype="uint8", shape=(8,)) for at in range(2)]
    with pytest.raises(BadRequestError, match="takes 8 bytes, found 9"):
        client.put_many(specs, [bytes(8), bytes(9)])
    assert client.stat()["num_objects"] == before


def test_many_objects_go_over_flight_where_the_arena_is_out_of_reach() -> None:
    with EmbeddedNode(memory_bytes=4 << 20, roots={}, host_id="elsewhere") as far, Client(far.uri) as client:
        refs = client.put_many(
            [ArraySpec(name=f"far/{at}", dtype="uint8", shape=(3,)) for at in range(3)], [b"abc"] * 3
        )
        assert [client.get(ref) for ref in refs] == [b"abc"] * 3


def test_any_number_of_names_is_released_in_one_call(client: Client) -> None:
    refs = client.put_many([ArraySpec(name=f"freed/{at}", dtype="uint8", shape=(1,)) for at in range(2)], [b"a", b"b"])
    names = [refs[0].name, *(f"absent/{at}" for at in range(MAX_ITEMS)), refs[1].name]
    assert client.release_names(names) == 2


def test_runs_are_bounded_by_bytes_and_by_number() -> None:
    assert list(batch_ranges([])) == []
    assert list(batch_ranges([1] * (GROUP_OBJECTS + 1))) == [(0, GROUP_OBJECTS), (GROUP_OBJECTS, GROUP_OBJECTS + 1)]
    assert list(batch_ranges([GROUP_BYTES, 1, GROUP_BYTES + 1])) == [(0, 1), (1, 2), (2, 3)]
