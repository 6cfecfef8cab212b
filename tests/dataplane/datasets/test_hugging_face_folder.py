"""Tests of folders in the layout of Hugging Face's `datasets` and of the Hugging Face hub."""

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import DatasetError
from dataplane.core.refs import Lineage, Ref
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.roots import MAX_STATE_BYTES
from tests.dataplane.shards import RECIPE, encode, noise
from tests.dataplane.tables import hugging_face_table, verl_table, write_lines, write_parquet

IMAGES = [encode(noise(at)) for at in range(6)]


def save(folder: Path, tables: list[pa.Table], options: pa.ipc.IpcWriteOptions | None = None) -> Path:
    """Write a folder like `Dataset.save_to_disk`: Arrow streams, and the file that lists them."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{len(tables):05d}.arrow" for at in range(len(tables))]
    for name, table in zip(names, tables):
        with pa.ipc.new_stream(str(folder / name), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def datasets_of(pattern: object) -> Catalog:
    return Catalog({"d": [str(pattern)]}, "node")


def media(datasets: Catalog, number: int) -> list[str]:
    return [ref.name for ref in datasets.samples("d", [number])[0].media]


def names(*numbers: int) -> list[str]:
    return [f"s/{content_digest(IMAGES[number])}" for number in numbers]


def test_a_saved_dataset_is_read_over_all_of_its_files(tmp_path: Path) -> None:
    datasets = datasets_of(save(tmp_path / "set", [hugging_face_table(IMAGES[:3]), hugging_face_table(IMAGES[3:])]))
    found = datasets.ingest("d")
    assert (found.num_samples, found.num_shards, found.bad) == (6, 2, ())
    assert [media(datasets, number) for number in range(6)] == [names(number) for number in range(6)]
    assert datasets.samples("d", [4])[0].fields == {"label": 1}


def test_media_of_a_mapped_file_are_ranges_that_workers_read_by_themselves(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", [verl_table([IMAGES[:2], [], IMAGES[2:3], IMAGES[3:5]])])
    refs = [ref for sample in datasets_of(folder).samples("d", range(4)) for ref in sample.media]
    other = datasets_of(folder)
    for ref, data in zip(refs, IMAGES[:5], strict=True):
        assert ref.lineage is not None
        place = other.locate(ref.lineage)
        assert place.file.is_local and place.offset > 0
        assert Path(place.file.path).read_bytes()[place.offset : place.offset + place.nbytes] == data
    with EmbeddedNode(memory_bytes=8 << 20, roots={"d": [str(folder)]}) as node:
        with Client(node.uri, timeout_s=30) as client, Reader(node.uri, timeout_s=30) as reader:
            made = [ref for ref in client.derive(refs, RECIPE) if isinstance(ref, Ref)]
            assert [view.shape for view in reader.resolve(made)] == [(16, 1176)] * 5


def test_compressed_and_remote_files_are_read_by_batch(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    folder = save(tmp_path / "set", [hugging_face_table(IMAGES[:3])], options)
    assert [media(datasets_of(folder), number) for number in range(3)] == [names(number) for number in range(3)]
    filesystem = fsspec.filesystem("memory")
    plain = save(tmp_path / "plain", [hugging_face_table(IMAGES[:3])])
    for path in plain.iterdir():
        filesystem.pipe(f"/saved/{path.name}", path.read_bytes())
    try:
        datasets = datasets_of("memory://saved")
        assert [media(datasets, number) for number in range(3)] == [names(number) for number in range(3)]
        lineage = datasets.samples("d", [2])[0].media[0].lineage
        assert lineage is not None
        assert datasets_of("memory://saved").locate(lineage).file.read(0, 99_999) == IMAGES[2]
    finally:
        filesystem.rm("/saved", recursive=True)


def test_an_arrow_file_with_an_index_is_read_too(tmp_path: Path) -> None:
    table = hugging_face_table(IMAGES[:3])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    datasets = datasets_of(tmp_path / "a.arrow")
    assert (datasets.ingest("d").num_samples, media(datasets, 2)) == (3, names(2))


def test_a_split_is_named_where_there_are_several(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        save(tmp_path / "all" / split, [hugging_face_table(IMAGES[:count])])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=r"has the splits test, train; name one: .*/SPLIT"):
        datasets_of(tmp_path / "all").ingest("d")
    assert datasets_of(tmp_path / "all" / "train").ingest("d").num_samples == 4


def test_a_folder_from_the_hub_is_its_files_of_one_format_and_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("about")
    for at in range(2):
        write_parquet(tmp_path / "data" / f"train-{at:05d}-of-00002.parquet", hugging_face_table(IMAGES[at : at + 2]))
    datasets = datasets_of(tmp_path)
    assert (datasets.ingest("d").num_samples, media(datasets, 3)) == (4, names(2))
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", hugging_face_table(IMAGES[:1]))
    with pytest.raises(DatasetError, match=r"has the splits test, train; name one with a glob: .*/\*\*/test\*"):
        datasets.ingest("d")
    assert datasets_of(f"{tmp_path}/**/test*").ingest("d").num_samples == 1
    write_lines(tmp_path / "more.jsonl", [{}])
    with pytest.raises(DatasetError, match="holds 3 parquet, 1 jsonl; wanted"):
        datasets.ingest("d")
    with pytest.raises(DatasetError, match=r"mixes formats: jsonl \(.*more.jsonl\), parquet"):
        Catalog({"d": [f"{tmp_path}/*.jsonl", f"{tmp_path}/data/*.parquet"]}, "node").ingest("d")


def test_what_is_no_dataset_is_said_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no file of a known format; wanted WebDataset tars"):
        datasets_of(tmp_path).ingest("d")
    (tmp_path / "a.bin").write_bytes(b"\x7fELF something")
    with pytest.raises(DatasetError, match=r"a.bin is of no known format \(extension 'bin', first bytes b'.x7fELF"):
        datasets_of(tmp_path / "a.bin").ingest("d")
    folder = save(tmp_path / "set", [hugging_face_table(IMAGES[:1])])
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DatasetError, match=r"lacks data-00000-of-00001.arrow, which its state.json names"):
        datasets_of(folder).ingest("d")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with pytest.raises(DatasetError, match="names files outside of its folder"):
        datasets_of(folder).ingest("d")
    for text in ("[]", "[" * 100_000):
        (folder / "state.json").write_text(text)
        with pytest.raises(DatasetError, match="is not what datasets' save_to_disk writes"):
            datasets_of(folder).ingest("d")
    (folder / "state.json").write_text(" " * (MAX_STATE_BYTES + 1))
    with pytest.raises(DatasetError, match=r"state.json has 16 MiB, and at most 16 MiB are read"):
        datasets_of(folder).ingest("d")


def test_a_torn_stream_keeps_the_batches_before_the_tear(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", [hugging_face_table(IMAGES)])
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    datasets = datasets_of(folder)
    found = datasets.ingest("d")
    assert found.num_samples == 2 or found.num_samples == 4
    assert [(bad.offset, "torn" in bad.reason) for bad in found.bad] == [(found.num_samples, True)]
    assert media(datasets, 1) == names(1)
    path.write_bytes(whole[:-8])
    assert "end-of-stream" in datasets.ingest("d").bad[0].reason
    for data in (b"", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 16, b"PAR1 not at all"):
        path.write_bytes(data)
        with pytest.raises(DatasetError, match=r"is no Arrow stream or file|unreadable Arrow schema"):
            datasets.ingest("d")


def test_a_mapped_file_that_was_cut_is_refused_not_touched(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", [hugging_face_table(IMAGES)])
    datasets = datasets_of(folder)
    lineage = datasets.samples("d", [5])[0].media[0].lineage
    assert lineage is not None
    path = folder / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:1000])
    for number in (0, 5):
        with pytest.raises(DatasetError, match="changed since it was ingested"):
            datasets.samples("d", [number])
    with pytest.raises(DatasetError, match=r"no sample in 1 shard.*torn"):
        datasets_of(folder).locate(Lineage(**lineage.to_dict()))


CUT_WHILE_READ = """
import os, sys
import pyarrow as pa
from dataplane.datasets.catalog import Catalog

datasets = Catalog({"d": [sys.argv[1]]}, "node")
datasets.ingest("d")
real = pa.ipc.read_record_batch

def cut(*arguments):
    os.truncate(sys.argv[1], 1000)
    return real(*arguments)

pa.ipc.read_record_batch = cut
print(datasets.samples("d", [5])[0].bad[0].reason)
"""


def test_a_file_that_is_cut_in_the_middle_of_a_read_does_not_end_the_process(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", [hugging_face_table([encode(noise(at, 300, 300)) for at in range(6)])])
    command = [sys.executable, "-c", CUT_WHILE_READ, str(folder / "data-00000-of-00001.arrow")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found
    assert "it was cut while it was read" in found.stdout


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_batch_that_grows_too_big_is_refused_before_it_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    folder = save(tmp_path / "set", [pa.table({"image": [bytes(5_000_000)] * 2})], options)
    monkeypatch.setattr("dataplane.datasets.formats.table_rows.MAX_GROUP_BYTES", 9_000_000)
    sample = datasets_of(folder).samples("d", [1])[0]
    assert "takes 100000" in sample.bad[0].reason and "once it is decompressed; wanted at most" in sample.bad[0].reason


def test_text_beside_the_media_of_a_batch_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "set", [pa.table({"image": IMAGES[:2], "text": ["x" * 5_000] * 2})])
    monkeypatch.setattr("dataplane.datasets.formats.table_rows.MAX_GROUP_BYTES", 9_000)
    assert "beside its media; wanted at most 9000" in datasets_of(folder).samples("d", [1])[0].bad[0].reason


def test_text_that_is_not_utf8_is_said_of_its_rows_not_raised(tmp_path: Path) -> None:
    table = pa.table({"word": pa.array([b"fine", b"caf\xe9"]).view(pa.string()), "n": [0, 1]})
    path = write_parquet(tmp_path / "a.parquet", table, rows_per_group=1)
    samples = datasets_of(path).samples("d", [0, 1])
    assert samples[0].fields == {"word": "fine", "n": 0}
    assert samples[1].bad[0].key == "row 1" and "cannot be read" in samples[1].bad[0].reason
