"""Tests of deriving on a real node: each object once, the same bytes after eviction, and bad media in quarantine with a
reason."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import (
    BadMediaError,
    BadRequestError,
    ChecksumError,
    DatasetError,
    MissingObjectError,
    NodeTimeoutError,
    OutOfSpaceError,
)
from dataplane.core.refs import BadMedia, Ref
from dataplane.media.limits import MediaLimits
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.media.test_kernel import run_kernel
from tests.dataplane.shards import RECIPE, encode, noise, wait_until, write_shard, write_tar


def good(results: list[Ref | BadMedia]) -> list[Ref]:
    assert all(isinstance(result, Ref) for result in results), results
    return results  # type: ignore[return-value]


def test_derived_patches_are_what_the_kernel_makes_and_carry_their_grid(client: Client, reader: Reader) -> None:
    sample = client.samples("good", [3])[0]
    ref = good(client.derive(sample.media, RECIPE))[0]
    expected, grid = run_kernel(Image.fromarray(noise(3)), dict(RECIPE))
    assert (ref.dtype, ref.shape) == ("uint8", expected.shape)
    assert ref.meta["grid_thw"] == [1, *grid] and ref.meta["num_tokens"] == grid[0] * grid[1] // 4
    assert np.array_equal(reader.resolve([ref])[0], expected)


def test_each_image_and_recipe_is_made_once_however_many_ask(client: Client) -> None:
    samples = client.samples("good", range(16))
    refs = [ref for sample in samples for ref in sample.media]
    assert refs[0].name == refs[12].name  # equal images in two shards
    recipe = {**RECIPE, "min_pixels": 100 * 100}
    before = client.stat()
    results: list[list[Ref]] = []
    threads = [threading.Thread(target=lambda: results.append(good(client.derive(refs * 2, recipe)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    after = client.stat()
    assert len(results) == 4 and all(result == results[0] for result in results)
    assert after["num_media"] - before["num_media"] == 15
    assert after["num_processed"] - before["num_processed"] == 15
    assert after["num_recomputed"] == before["num_recomputed"]
    assert results[0][0].lineage != results[0][12].lineage


def test_corrupt_media_are_set_aside_with_shard_key_and_reason(client: Client, reader: Reader) -> None:
    samples = client.samples("bad", range(7))
    results = client.derive([sample.media[0] for sample in samples], RECIPE)
    reasons = {result.key: result.reason for result in results if isinstance(result, BadMedia)}
    assert sorted(reasons) == ["empty", "jpeg", "text", "thin", "torn"]
    assert "truncated or corrupt PNG" in reasons["torn"]
    assert "0 bytes" in reasons["empty"]
    assert "known format" in reasons["text"]
    assert "mislabelled: named as PNG, holds JPEG" in reasons["jpeg"]
    assert "aspect ratio 300" in reasons["thin"]
    bad = next(result for result in results if isinstance(result, BadMedia))
    assert (bad.dataset, bad.shard) == ("bad", "bad-000.tar") and bad.offset > 0
    num_quarantined = client.stat()["num_quarantined"]
    assert num_quarantined == 5 == len(client.quarantine())
    client.derive([sample.media[0] for sample in samples], RECIPE)
    assert client.stat()["num_quarantined"] == 5
    ref = good([results[0]])[0]
    wanted = Ref.from_dict(ref.to_dict() | {"name": bad.name, "lineage": samples[1].media[0].to_dict()["lineage"]})
    with pytest.raises(BadRequestError, match="does not match its lineage"):
        reader.resolve([wanted])


def test_a_source_put_by_hand_can_be_derived_until_it_is_lost(client: Client, reader: Reader) -> None:
    source = client.put_source(encode(noise(77), "JPEG"))
    ref = good(client.derive([source], RECIPE))[0]
    assert reader.resolve([ref, source])[1].tobytes() == encode(noise(77), "JPEG")
    assert isinstance(client.derive([client.put_source(b"no image")], RECIPE)[0], BadMedia)
    lost = Ref.from_dict(source.to_dict() | {"name": "s/" + "0" * 32})
    with pytest.raises(BadRequestError, match="does not match its lineage"):
        client.derive([lost], RECIPE)
    assert client.derive([ref], RECIPE) == [ref], "a derived ref stands for its source"
    with pytest.raises(BadRequestError, match="derive works on refs of media"):
        client.derive([client.put(b"plain", name="plain")], RECIPE)


@pytest.fixture
def small_node(tmp_path: Path) -> Iterator[tuple[EmbeddedNode, Path]]:
    """A node of 1 MiB over a shard of eight images whose patches take 300 KB each."""
    shard = write_shard(tmp_path / "a.tar", {f"{at}": encode(noise(at, 224, 224)) for at in range(8)})
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as node:
        yield node, shard


def test_an_evicted_object_is_made_again_with_the_same_bytes(small_node: tuple[EmbeddedNode, Path]) -> None:
    node, _ = small_node
    with Client(node.uri) as client, Reader(node.uri) as reader:
        refs = good(client.derive([s.media[0] for s in client.samples("a", range(8))], RECIPE))
        assert client.stat()["num_evicted"] >= 5
        first = [view.copy() for ref in refs for view in reader.resolve([ref])]
        wait_until(lambda: client.stat()["num_leases"] == 0)
        again = [view.copy() for ref in reversed(refs) for view in reader.resolve([ref])][::-1]
        assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
        assert client.get(refs[0]) == first[0].tobytes()
        found = client.stat()
        assert found["num_media"] == 8
        assert found["num_recomputed"] > 8
        assert found["num_processed"] == found["num_media"] + found["num_recomputed"]


def test_leased_views_are_never_overwritten_while_others_are_made(small_node: tuple[EmbeddedNode, Path]) -> None:
    node, _ = small_node
    with Client(node.uri) as client, Reader(node.uri) as reader:
        refs = good(client.derive([s.media[0] for s in client.samples("a", range(8))], RECIPE))
        held = reader.resolve(refs[:2])
        copies = [view.copy() for view in held]
        for ref in refs[2:] * 3:
            reader.resolve([ref])
        assert all(np.array_equal(view, copy) for view, copy in zip(held, copies, strict=True))


def test_a_changed_shard_is_noticed_not_served(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", {str(at): encode(noise(at)) for at in range(8)})
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"a": [str(shard)]}))
    try:
        services, deadline = node.services, time.monotonic() + 60
        source = services.datasets.samples("a", [0])[0].media[0]
        before = source.lineage
        assert before is not None
        data = bytearray(shard.read_bytes())
        data[before.offset + before.nbytes - 40] ^= 1
        shard.write_bytes(data)
        made = services.deriver.derive([source], RECIPE, deadline)[0]
        assert isinstance(made, Ref), "the bytes were read before the change, and their digest says so"
        services.store.release([made.name])
        services.store.abort(services.store.allocate(services.segment.capacity, deadline))  # evicts everything
        services.datasets._caches.encoded.__init__(0)  # type: ignore[misc]
        with pytest.raises(DatasetError, match="the shard changed"):
            services.deriver.make_resident([made], deadline)
        with pytest.raises(ChecksumError, match="the shard changed"):
            services.deriver.make_resident([source], deadline)
    finally:
        node.stop()


def test_a_ref_of_one_node_is_made_again_by_another(small_node: tuple[EmbeddedNode, Path]) -> None:
    node, shard = small_node
    with Client(node.uri) as client:
        ref = good(client.derive(client.samples("a", [1])[0].media, RECIPE))[0]
        data = client.get(ref)
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as other, Reader(other.uri) as reader:
        assert reader.resolve([ref])[0].tobytes() == data
        wrong = Ref.from_dict(ref.to_dict() | {"meta": {**ref.meta, "checksum": "0" * 32}})
        with Client(other.uri) as client:
            assert client.stat()["num_recomputed"] == 0 and client.stat()["num_processed"] == 1
    with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as third, Reader(third.uri) as reader:
        with pytest.raises(ChecksumError, match="before it was 0000"):
            reader.resolve([wrong])
    with EmbeddedNode(memory_bytes=1 << 20, roots={}) as empty, Reader(empty.uri) as reader:
        with pytest.raises(DatasetError, match="not registered"):
            reader.resolve([ref])


def test_encoded_bytes_of_a_remote_shard_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[int, int]] = Counter()
    real = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, start: int = 0, end: int = 0, **kwargs: Any) -> bytes:
        reads[start, end] += 1
        return bytes(real(self, path, start, end, **kwargs))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    data = write_shard(tmp_path / "a.tar", {"0": encode(noise(0)), "1": b"no image"}).read_bytes()
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/remote/a.tar", data)
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"r": ["memory://remote/*.tar"]}))
    try:
        services, deadline = node.services, time.monotonic() + 60
        services.datasets.ingest("r")
        reads.clear()
        sources = [sample.media[0] for sample in services.datasets.samples("r", [0, 1])]
        made, bad = services.deriver.derive(sources, RECIPE, deadline)
        assert isinstance(made, Ref) and isinstance(bad, BadMedia) and bad.key == "1"
        places = [source.lineage for source in sources if source.lineage is not None]
        assert [reads[place.offset, place.offset + place.nbytes] for place in places] == [1, 1]
        assert reads.total() == 4  # two images, and two members of JSON
        entry = services.store.find(made.name)
        assert entry is not None
        expected, _ = run_kernel(Image.fromarray(noise(0)), dict(RECIPE))
        assert np.array_equal(services.store.content(entry).reshape(made.shape), expected)
        # later, when they are not in memory any more, the source is fetched into the arena and derived there
        services.store.release([made.name])
        services.store.abort(services.store.allocate(services.segment.capacity, deadline))  # evicts everything
        services.datasets._caches.encoded.__init__(0)  # type: ignore[misc]
        services.deriver.make_resident([made], deadline)
        assert services.store.find(sources[0].name) is not None
        assert reads.total() == 5
    finally:
        node.stop()
        filesystem.rm("/remote", recursive=True)


def test_a_quarantined_object_cannot_be_resolved(small_node: tuple[EmbeddedNode, Path]) -> None:
    node, _ = small_node
    with Client(node.uri) as client, Reader(node.uri) as reader:
        source = client.put_source(b"nothing to see")
        bad = client.derive([source], RECIPE)[0]
        assert isinstance(bad, BadMedia) and source.lineage is not None
        ref = Ref(
            name=bad.name,
            kind="derived",
            dtype="uint8",
            shape=(0,),
            nbytes=0,
            node="",
            lineage=type(source.lineage)(**(source.lineage.to_dict() | {"recipe": dict(RECIPE)})),
        )
        with pytest.raises(BadMediaError, match="in quarantine: not an image"):
            reader.resolve([ref])
        client.release([source])
        with pytest.raises(MissingObjectError):
            reader.resolve([Ref.from_dict(source.to_dict() | {"kind": "plain", "lineage": None, "name": "nope"})])


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[Node]:
    """A node of 1 MiB in this process, over a shard of three images whose patches take 300 KB each."""
    shard = write_shard(tmp_path / "one.tar", {f"{at}": encode(noise(at, 224, 224)) for at in range(3)})
    limits = MediaLimits(max_decode_seconds=5.0)
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"a": [str(shard)]}, limits=limits))
    yield node
    node.stop()


def derive_in(node: Node, number: int, timeout_s: float) -> list[Ref | BadMedia]:
    media = node.services.datasets.samples("a", [number])[0].media
    return node.services.deriver.derive(media, RECIPE, time.monotonic() + timeout_s)


def test_a_caller_with_time_left_does_not_fail_with_another_callers_deadline(one_node: Node) -> None:
    slab = one_node.services.store.allocate(900_000, time.monotonic())
    failed: list[Exception] = []
    made: list[Ref | BadMedia] = []

    def ask(timeout_s: float) -> None:
        try:
            made.extend(derive_in(one_node, 0, timeout_s))
        except (OutOfSpaceError, NodeTimeoutError) as error:
            failed.append(error)
            one_node.services.store.abort(slab)

    threads = [threading.Thread(target=ask, args=(timeout_s,)) for timeout_s in (3.0, 60.0)]
    threads[0].start()
    wait_until(lambda: bool(one_node.services.deriver._in_flight))
    threads[1].start()
    for thread in threads:
        thread.join(90)
    assert len(failed) == 1 and len(good(made)) == 1


def test_waiting_for_room_is_not_the_mediums_fault(one_node: Node) -> None:
    good(derive_in(one_node, 0, 60))
    one_node.services.store.release([ref.name for ref in good(derive_in(one_node, 0, 60))])
    slab = one_node.services.store.allocate(1_000_000, time.monotonic())
    threading.Timer(5.5, one_node.services.store.abort, [slab]).start()  # longer than a decode may take
    good(derive_in(one_node, 1, 60))


def test_what_a_ref_claims_beside_its_lineage_poisons_nothing(small_node: tuple[EmbeddedNode, Path]) -> None:
    node, shard = small_node
    with Client(node.uri) as client:
        source = client.samples("a", [1])[0].media[0]
        ref = good(client.derive([source], RECIPE))[0]
    edits: list[dict[str, Any]] = [{"dtype": "int8"}, {"shape": [7], "nbytes": 7}, {"meta": {"checksum": "0" * 32}}]
    for item, edit in [(ref, edit) for edit in edits] + [(source, edits[0]), (source, edits[1])]:
        with EmbeddedNode(memory_bytes=1 << 20, roots={"a": [str(shard)]}) as other, Reader(other.uri) as reader:
            with pytest.raises(ChecksumError):
                reader.resolve([Ref.from_dict(item.to_dict() | edit)])
            assert reader.resolve([item])[0].shape == item.shape


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_bytes_under_a_right_and_a_wrong_name_are_judged_by_the_name(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    write_tar(tmp_path / "a.tar", {"a.png": encode(noise(0), "JPEG"), "b.jpg": encode(noise(0), "JPEG")})
    node = Node(NodeConfig(memory_bytes=1 << 20, roots={"a": [str(tmp_path / "a.tar")]}))
    try:
        found = {at: derive_in(node, at, 60)[0] for at in order}
        wrong, right = found[0], found[1]
        assert isinstance(wrong, BadMedia) and wrong.key == "a" and "named as PNG, holds JPEG" in wrong.reason
        assert isinstance(right, Ref)
        media = [sample.media[0] for sample in node.services.datasets.samples("a", order)]
        again = node.services.deriver.derive(media, RECIPE, time.monotonic() + 60)
        assert again == [found[at] for at in order]
        assert node.stat()["num_quarantined"] == 1
    finally:
        node.stop()
