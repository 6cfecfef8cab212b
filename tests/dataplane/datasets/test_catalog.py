"""Tests of registered datasets: samples in order, digests as names, and clear messages for files that cannot be
read."""

import io
import json
import os
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.digests import content_digest
from dataplane.core.errors import BadRequestError, DatasetError
from dataplane.core.refs import Lineage, Ref
from dataplane.datasets.catalog import Catalog
from tests.dataplane.shards import RECIPE, encode, noise, write_shard, write_tar


def test_samples_come_in_shard_and_tar_order_with_fields_and_media(tmp_path: Path) -> None:
    images = {f"{at}": encode(noise(at)) for at in range(6)}
    write_shard(tmp_path / "b.tar", {key: images[key] for key in "345"})
    write_shard(tmp_path / "a.tar", {key: images[key] for key in "012"})
    datasets = Catalog({"d": [str(tmp_path / "*.tar")]}, "node")
    found = datasets.ingest("d")
    assert (found.num_samples, found.num_shards, found.bad) == (6, 2, ())
    samples = datasets.samples("d", [4, 0, 2])
    assert [(sample.index, sample.key, sample.shard) for sample in samples] == [
        (4, "4", "b.tar"),
        (0, "0", "a.tar"),
        (2, "2", "a.tar"),
    ]
    assert samples[0].fields == {"answer": "4"}
    assert samples[0].media[0].name == f"s/{content_digest(images['4'])}"
    lineage = samples[0].media[0].lineage
    assert lineage is not None
    place = datasets.locate(lineage)
    assert place.file.read(place.offset, place.nbytes) == images["4"]


def test_several_images_of_a_sample_keep_their_order_and_other_members_are_left_alone(tmp_path: Path) -> None:
    images = [encode(noise(at)) for at in range(2)]
    members = {"k.1.png": images[1], "k.0.png": images[0], "k.md": b"no", "k.json": b'{"a": 1}'}
    write_tar(tmp_path / "a.tar", members)
    sample = Catalog({"d": [str(tmp_path / "a.tar")]}, "node").samples("d", [0])[0]
    assert [ref.name for ref in sample.media] == [f"s/{content_digest(images[at])}" for at in (1, 0)]
    assert sample.fields == {"a": 1}


def test_fields_that_are_not_json_are_reported_with_the_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"k.json": b"{broken", "l.json": b"[1]", "m.png": b"x"})
    samples = Catalog({"d": [str(tmp_path / "a.tar")]}, "node").samples("d", [0, 1, 2])
    assert [bad.key for sample in samples for bad in sample.bad] == ["k", "l"]
    assert "is not JSON" in samples[0].bad[0].reason
    assert "wanted an object" in samples[1].bad[0].reason


def npy(values: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, **options))
    return buffer.getvalue()


def test_members_of_webdataset_are_fields(tmp_path: Path) -> None:
    boxes = np.asfortranarray([[1, 2.5, np.nan], [4, 5, 6]])
    members = {
        "k.cls": b" 7\n",
        "k.txt": "Wélche?".encode(),
        "k.answer.txt": b"seven",
        "k.boxes.npy": npy(boxes, order="F"),
        "k.npy": npy(["a", "bc"]),
        "k.json": b'{"txt": "of the object", "a": 1}',
        "l.cls": b"seven",
        "m.txt": b"\xff",
        "n.npy": b"\x93NUMPY",
        "o.npy": npy([{}]),
        "p.npy": npy([1])[:-1],
        "q.npy": npy([1]).replace(b"(1,)", b"(9**9,)"),
        "r.npy": npy([1]).replace(b"(1,), ", b"(-1,),"),
        "s.npy": npy([1]).replace(b"(1,), }         ", b"(10**9, 0), }   "),
        "t.npy": npy(np.zeros((1 << 20, 0))).replace(b"1048576", b"9999999"),
        "u.npy": npy([1])[:40],
    }
    write_tar(tmp_path / "a.tar", members)
    good, *bad = Catalog({"d": [str(tmp_path / "a.tar")]}, "node").samples("d", range(11))
    assert good.fields == {
        "cls": 7,
        "txt": "of the object",
        "answer": "seven",
        "boxes": [[1, 2.5, None], [4, 5, 6]],
        "npy": ["a", "bc"],
        "a": 1,
    }
    reasons = [sample.bad[0].reason for sample in bad]
    assert reasons[0] == "l.cls holds 'seven'; wanted a whole number"
    assert reasons[1].startswith("m.txt is no text in UTF-8")
    assert all(
        f"{key}.npy is no array of numbers or texts: " in reason
        for key, reason in zip("nopqrstu", reasons[2:], strict=True)
    )


def test_bytes_of_media_in_a_json_member_do_not_travel_and_fields_can_be_dropped(tmp_path: Path) -> None:
    url = "data:image/png;base64,AAAA"
    turns = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    write_tar(tmp_path / "a.tar", {"k.json": json.dumps({"messages": turns, "a": 1}).encode(), "k.npy": npy([1, 2])})
    (sample,) = Catalog({"d": [f"{tmp_path}/a.tar#drop=npy"]}, "node").samples("d", [0])
    assert sample.fields == {"messages": [{"role": "user", "content": [{"type": "image"}]}], "a": 1}


def test_a_shard_is_never_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", {f"{at}.png": bytes(1 << 20) for at in range(8)})
    num_bytes = 0
    from dataplane.datasets.formats import range_files

    real = range_files.read_local

    def counted(path: str, offset: int, nbytes: int, *, no_links: bool = False) -> bytes:
        nonlocal num_bytes
        data = real(path, offset, nbytes, no_links=no_links)
        num_bytes += len(data)
        return data

    monkeypatch.setattr(range_files, "read_local", counted)
    assert Catalog({"d": [str(tmp_path / "a.tar")]}, "node").ingest("d").num_samples == 8
    assert 0 < num_bytes < 1 << 20


def test_a_remote_shard_is_read_by_range_too(tmp_path: Path) -> None:
    data = write_shard(tmp_path / "a.tar", {"0": encode(noise(0)), "1": encode(noise(1))}).read_bytes()
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/shards/a.tar", data)
    try:
        datasets = Catalog({"d": ["memory://shards/*.tar"]}, "node")
        assert datasets.ingest("d").num_samples == 2
        assert datasets.samples("d", [1])[0].media[0].name == f"s/{content_digest(encode(noise(1)))}"
    finally:
        filesystem.rm("/shards", recursive=True)


def test_a_changed_shard_is_indexed_again(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": encode(noise(0))})
    datasets = Catalog({"d": [str(tmp_path / "*.tar")]}, "node")
    first = datasets.samples("d", [0])[0].media[0]
    assert datasets.ingest("d") is datasets.ingest("d")
    time.sleep(0.01)
    write_shard(tmp_path / "a.tar", {"0": encode(noise(1)), "1": encode(noise(0))})
    assert datasets.ingest("d").num_samples == 2
    assert datasets.samples("d", [1])[0].media[0].name == first.name


def test_what_cannot_be_read_is_said_clearly(tmp_path: Path) -> None:
    write_tar(tmp_path / "zero.tar", {})
    datasets = Catalog({"none": [str(tmp_path / "no-*.tar")], "zero": [str(tmp_path / "zero.tar")]}, "node")
    with pytest.raises(DatasetError, match=r"no file matches '.*no-\*\.tar'.*--root"):
        datasets.ingest("none")
    with pytest.raises(DatasetError, match=r"no sample in 1 shard\(s\)"):
        datasets.ingest("zero")
    with pytest.raises(DatasetError, match="'other' is not registered; this node has: none, zero"):
        datasets.ingest("other")


def test_only_members_of_registered_shards_can_be_located(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": encode(noise(0))})
    (tmp_path / "secret.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    datasets = Catalog({"d": [str(tmp_path / "a.tar")]}, "node")
    good = datasets.samples("d", [0])[0].media[0].lineage
    assert good is not None
    fields = good.to_dict()
    for change in ({"shard": "secret.tar"}, {"shard": "../a.tar"}, {"offset": 0}, {"nbytes": 10}):
        with pytest.raises(DatasetError, match="has no medium"):
            datasets.locate(Lineage(**(fields | change)))
    with pytest.raises(BadRequestError, match="wanted 0 to 0"):
        datasets.samples("d", [1])
    assert json.dumps(fields)


def test_members_that_are_too_big_or_too_deep_are_reported_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.datasets.formats.tar_members.MAX_MEDIUM_BYTES", 1000)
    monkeypatch.setattr("dataplane.datasets.formats.tar.MAX_FIELDS_BYTES", 200_000)
    members = {"a.png": bytes(1001), "b.json": b"[" * 100_000, "c.json": b" " * 200_001, "d.png": bytes(1000)}
    write_tar(tmp_path / "a.tar", members)
    datasets = Catalog({"d": [str(tmp_path / "a.tar")]}, "node")
    found = datasets.ingest("d")
    assert found.num_samples == 3
    assert [(bad.key, "wanted at most 1000" in bad.reason) for bad in found.bad] == [("a", True)]
    samples = datasets.samples("d", range(3))
    assert ["is not JSON" in samples[0].bad[0].reason, "200001 bytes" in samples[1].bad[0].reason] == [True, True]


def test_member_names_that_are_no_text_travel_and_come_back(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    with tarfile.open(tmp_path / "a.tar", "w", encoding="utf-8", errors="surrogateescape") as tar:
        info = tarfile.TarInfo(f"{odd}.png")
        info.size = len(data := encode(noise(0)))
        tar.addfile(info, io.BytesIO(data))
    with EmbeddedNode(memory_bytes=4 << 20, roots={"d": [str(tmp_path / "a.tar")]}) as node:
        with Client(node.uri, timeout_s=30) as client:
            sample = client.samples("d", [0])[0]
            assert sample.key == odd
            assert isinstance(client.derive(sample.media, RECIPE)[0], Ref)


def test_digests_and_places_of_a_tar_are_kept_in_arrays(tmp_path: Path) -> None:
    num = 20_000
    block = b"".join(tar_header(f"{at:06d}.png", 5) + b"image".ljust(512, b"\0") for at in range(num))
    (tmp_path / "a.tar").write_bytes(block + bytes(1024))
    datasets = Catalog({"d": [str(tmp_path / "a.tar")]}, "node")
    tracemalloc.start()
    try:
        assert datasets.ingest("d").num_samples == num
        assert tracemalloc.get_traced_memory()[0] < 100 * num
        datasets.samples("d", range(0, num, 10))
        assert tracemalloc.get_traced_memory()[0] < 100 * num
    finally:
        tracemalloc.stop()


def tar_header(name: str, nbytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = nbytes
    return info.tobuf(tarfile.USTAR_FORMAT)


def test_a_shard_that_cannot_be_used_is_quarantined_as_a_whole_and_the_others_served(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"0": encode(noise(0))})
    (tmp_path / "b.tar").write_bytes(b"")
    (tmp_path / "c.tar").write_bytes(b"no tar at all" * 100)
    datasets = Catalog({"d": [str(tmp_path / "*.tar")]}, "node")
    found = datasets.ingest("d")
    assert (found.num_samples, found.num_shards) == (1, 1)
    assert [(bad.shard, bad.offset) for bad in found.bad] == [("b.tar", -1), ("c.tar", -1)]
    assert datasets.stat()["d"] == {
        "num_samples": 1,
        "num_shards": 1,
        "num_bad": 2,
        "num_shards_found": 3,
        "num_shards_read": 3,
    }


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_two_sets_read_the_same_file_each_in_its_own_way(kind: str, tmp_path: Path) -> None:
    path, fields = tmp_path / f"a.{kind}", {"question": "What?", "answer": "7"}
    if kind == "tar":
        write_tar(path, {"0.json": json.dumps(fields).encode()})
    elif kind == "jsonl":
        path.write_text(json.dumps(fields) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([fields]), path)
    catalog = Catalog({"all": [str(path)], "less": [f"{path}#drop=answer"]}, "node")
    for _ in range(2):
        (whole,), (less,) = catalog.samples("all", [0]), catalog.samples("less", [0])
        assert whole.fields == fields and "answer" not in less.fields
