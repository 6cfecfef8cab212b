"""Tests of Parquet as a dataset: the columns of verl and Hugging Face, row groups, and messages for columns that cannot
be served."""

import datetime
import decimal
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.digests import content_digest
from dataplane.core.errors import DatasetError
from dataplane.core.refs import BadMedia, Lineage, Ref
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.formats.parquet import ParquetGroups
from tests.dataplane.shards import RECIPE, encode, noise
from tests.dataplane.tables import IMAGE, hugging_face_table, verl_table, write_parquet

IMAGES = [encode(noise(at)) for at in range(6)]


def datasets_of(*patterns: object) -> Catalog:
    return Catalog({"d": [str(pattern) for pattern in patterns]}, "node")


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A folder with two shards: one with rows of two images, one image and none; one with a row of one image."""
    write_parquet(tmp_path / "train-0.parquet", verl_table([IMAGES[:2], IMAGES[2:3], []]))
    write_parquet(tmp_path / "train-1.parquet", verl_table([IMAGES[3:4]]))
    return tmp_path


def test_verls_rows_have_their_turns_as_fields_and_their_images_in_order(verl: Path) -> None:
    datasets = datasets_of(verl / "*.parquet")
    found = datasets.ingest("d")
    assert (found.num_samples, found.num_shards, found.bad) == (4, 2, ())
    samples = datasets.samples("d", [3, 0, 2])
    assert [(sample.index, sample.key, sample.shard) for sample in samples] == [
        (3, "row 0", "train-1.parquet"),
        (0, "row 0", "train-0.parquet"),
        (2, "row 2", "train-0.parquet"),
    ]
    assert samples[1].fields == {
        "data_source": "geometry",
        "prompt": [{"content": "<image>What is in picture 0?", "role": "user"}],
        "reward_model": {"ground_truth": "0", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    assert [ref.name for ref in samples[1].media] == [f"s/{content_digest(data)}" for data in IMAGES[:2]]
    assert [ref.lineage.part for ref in samples[1].media if ref.lineage] == ["images/0", "images/1"]
    assert samples[2].media == () and samples[2].bad == ()


def test_hugging_faces_image_column_is_media_and_its_label_a_field(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", hugging_face_table(IMAGES[:3]))
    samples = datasets_of(tmp_path / "a.parquet").samples("d", [2])
    assert samples[0].fields == {"label": 2}
    assert [ref.name for ref in samples[0].media] == [f"s/{content_digest(IMAGES[2])}"]


def test_another_node_finds_the_same_bytes_from_the_lineage_alone(verl: Path) -> None:
    lineages = [ref.lineage for ref in datasets_of(verl / "*.parquet").samples("d", [0])[0].media]
    other = datasets_of(verl / "*.parquet")
    for lineage, data in zip(lineages, IMAGES):
        assert lineage is not None
        place = other.locate(lineage)
        assert place.file.read(place.offset, place.nbytes) == data
        for change in ({"offset": 3}, {"offset": -1}, {"part": "images/2"}, {"part": "prompt/0"}, {"nbytes": 5}):
            with pytest.raises(DatasetError, match="has no medium"):
                other.locate(Lineage(**(lineage.to_dict() | change)))


def test_plain_binary_columns_are_media_where_the_root_says_so(tmp_path: Path) -> None:
    table = pa.table({"photo": pa.array(IMAGES[:2]), "scan": pa.array(IMAGES[2:4]), "n": [0, 1]})
    path = write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(DatasetError, match=r"'photo' \(binary\) holds bytes.*#media=photo.*#drop=photo"):
        datasets_of(path).ingest("d")
    sample = datasets_of(f"{path}#media=photo&drop=scan").samples("d", [1])[0]
    assert sample.fields == {"n": 1}
    assert [ref.name for ref in sample.media] == [f"s/{content_digest(IMAGES[1])}"]
    with pytest.raises(DatasetError, match="no column 'foto', which the root names; it has photo, scan, n"):
        datasets_of(f"{path}#media=foto").ingest("d")
    with pytest.raises(DatasetError, match="unknown option 'medium'"):
        datasets_of(f"{path}#medium=photo").ingest("d")


def test_media_without_bytes_are_quarantined_and_the_others_served(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", verl_table([[IMAGES[0], None, b"", IMAGES[1]]]))
    sample = datasets_of(path).samples("d", [0])[0]
    assert [ref.lineage.part for ref in sample.media if ref.lineage] == ["images/0", "images/3"]
    assert [(bad.shard, bad.offset, bad.key) for bad in sample.bad] == [
        ("a.parquet", 0, "row 0 images/1"),
        ("a.parquet", 0, "row 0 images/2"),
    ]
    assert ["neither bytes nor a path" in sample.bad[0].reason, "empty: 0 bytes" in sample.bad[1].reason] == [True] * 2


def test_a_null_image_is_bad_unless_the_root_calls_the_column_optional(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", hugging_face_table([IMAGES[0], None]))
    assert "null; say #optional=" in datasets_of(path).samples("d", [1])[0].bad[0].reason
    sample = datasets_of(f"{path}#optional=image").samples("d", [1])[0]
    assert (sample.media, sample.bad) == ((), ())


def test_paths_in_cells_lead_to_files_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(IMAGES[0])
    cells = pa.array([{"bytes": None, "path": "0.png"}, {"bytes": None, "path": "/etc/passwd"}], IMAGE)
    path = write_parquet(tmp_path / "a.parquet", pa.table({"image": cells}))
    datasets = datasets_of(path)
    good, bad = datasets.samples("d", [0, 1])
    assert good.media[0].name == f"s/{content_digest(IMAGES[0])}"
    assert good.media[0].lineage is not None
    place = datasets.locate(good.media[0].lineage)
    assert (place.file.path, place.file.is_local, place.formats) == (str(tmp_path / "0.png"), True, ("PNG",))
    assert "outside of" in bad.bad[0].reason and "--media-root" in bad.bad[0].reason


def test_fields_of_every_type_arrive_as_json_has_them(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    table = pa.table(
        {
            "at": [moment],
            "day": [moment.date()],
            "took": [datetime.timedelta(seconds=90)],
            "price": [decimal.Decimal("1.50")],
            "nan": [float("nan")],
            "deep": [[{"a": [1.5, None]}]],
            "kind": pa.array(["x"]).dictionary_encode(),
        }
    )
    sample = datasets_of(write_parquet(tmp_path / "a.parquet", table)).samples("d", [0])[0]
    assert sample.fields == {
        "at": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "took": 90.0,
        "price": "1.50",
        "nan": None,
        "deep": [{"a": [1.5, None]}],
        "kind": "x",
    }


def test_only_the_row_groups_and_columns_that_are_asked_for_are_read(
    verl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, bool]] = []
    real = ParquetGroups.read

    def counted(self: ParquetGroups, group: int, columns: tuple[str, ...], max_bytes: int) -> pa.Table:
        reads.append((group, "images" in columns))
        return real(self, group, columns, max_bytes)

    monkeypatch.setattr(ParquetGroups, "read", counted)
    datasets = datasets_of(verl / "train-0.parquet")
    sample = datasets.samples("d", [1, 0, 1])[0]
    assert reads == [(0, False), (0, True)]
    datasets._parser.tasks.groups.__init__(0)  # type: ignore[attr-defined]
    datasets._caches.fields.__init__(0)  # type: ignore[misc]
    datasets.samples("d", [0, 1])
    assert reads[2:] == [(0, False)], "what was named once is not read again to be named"
    assert sample.media[0].lineage is not None
    encoded = datasets.take_encoded(sample.media[0].lineage.source)
    assert encoded == datasets.locate(sample.media[0].lineage).file.read(0, sample.media[0].nbytes)


def test_a_row_group_that_is_too_big_to_be_read_at_once_is_refused(verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.datasets.formats.table_rows.MAX_GROUP_BYTES", 10_000)
    with pytest.raises(DatasetError, match=r"row group 0 has \d+ bytes; .*row_group_size=100"):
        datasets_of(verl / "train-0.parquet").ingest("d")


@pytest.mark.parametrize("column", ["images", "text"])
def test_a_group_that_repeats_what_it_stores_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    big = np.random.default_rng(0).bytes(1_000_000)
    cells = pa.array([big] * 100) if column == "images" else pa.array([big.hex()[:1_000_000]] * 100)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({column: cells, "n": range(100)}), path, dictionary_pagesize_limit=2 << 20)
    assert path.stat().st_size < 1_100_000
    monkeypatch.setattr("dataplane.datasets.formats.table_rows.MAX_GROUP_BYTES", 10_000_000)
    datasets = datasets_of(path)
    assert datasets.ingest("d").num_samples == 100
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        samples = datasets.samples("d", [3, 99])
    finally:
        pa.set_memory_pool(usual)
    assert [(sample.media, len(sample.bad)) for sample in samples] == [((), 1)] * 2
    assert "row group 0 takes more than 10000000 bytes once it is decoded" in samples[0].bad[0].reason
    assert pool.max_memory() is not None and pool.max_memory() < 40_000_000


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "it is torn, or still being written"),
        (lambda data: b"", "has 0 bytes"),
        (lambda data: b"no parquet" * 99, "begins with b'no p'"),
        (lambda data: data[:-1000] + b"\xff" * 992 + data[-8:], "is not a readable Parquet file"),
    ],
)
def test_a_damaged_shard_is_quarantined_and_the_others_served(
    verl: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = verl / "train-0.parquet"
    path.write_bytes(damage(path.read_bytes()))
    found = datasets_of(verl / "*.parquet").ingest("d")
    assert (found.num_samples, found.num_shards, [bad.shard for bad in found.bad]) == (1, 1, ["train-0.parquet"])
    assert reason in found.bad[0].reason
    with pytest.raises(DatasetError, match=r"no sample in 1 shard\(s\)"):
        datasets_of(path).ingest("d")


def test_damage_inside_a_row_group_is_said_of_its_rows_alone(verl: Path) -> None:
    path = write_parquet(verl / "train-0.parquet", verl_table([[data] for data in IMAGES]))
    data = bytearray(path.read_bytes())
    data[4:20_000] = bytes(19_996)
    path.write_bytes(data)
    samples = datasets_of(path).samples("d", [0, 5])
    assert "row group 0 cannot be read" in samples[0].bad[0].reason
    assert samples[1].bad == () and len(samples[1].media) == 1


def test_shards_with_other_columns_are_refused_with_the_difference(verl: Path) -> None:
    write_parquet(verl / "train-1.parquet", hugging_face_table(IMAGES[:1]))
    with pytest.raises(DatasetError, match=r"train-1.parquet has other columns.*lacks data_source.*has image, label"):
        datasets_of(verl / "*.parquet").ingest("d")


def test_a_file_that_changed_after_ingest_is_detected(verl: Path) -> None:
    datasets = datasets_of(verl / "train-1.parquet")
    datasets.ingest("d")
    write_parquet(verl / "train-1.parquet", verl_table([IMAGES[:1], IMAGES[:1]]))
    with pytest.raises(DatasetError, match=r"changed since it was ingested.*ingest the dataset again"):
        datasets.samples("d", [0])
    assert datasets.ingest("d").num_samples == 2


def test_a_remote_table_is_read_by_range(verl: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/tables/a.parquet", (verl / "train-0.parquet").read_bytes())
    try:
        sample = datasets_of("memory://tables/*.parquet").samples("d", [1])[0]
        assert sample.media[0].name == f"s/{content_digest(IMAGES[2])}"
    finally:
        filesystem.rm("/tables", recursive=True)


@pytest.fixture
def node(verl: Path) -> Iterator[EmbeddedNode]:
    """A node that serves the verl shards."""
    roots = {"d": [f"{verl}/*.parquet"]}
    with EmbeddedNode(memory_bytes=16 << 20, roots=roots, num_workers=2) as started:
        yield started


def test_patches_of_a_tables_images_are_derived_and_made_again(node: EmbeddedNode, verl: Path) -> None:
    with Client(node.uri, timeout_s=30) as client, Reader(node.uri, timeout_s=30) as reader:
        refs = [ref for sample in client.samples("d", range(4)) for ref in sample.media]
        made = client.derive(refs, RECIPE)
        assert all(isinstance(ref, Ref) for ref in made)
        again = [ref for ref in made if isinstance(ref, Ref)]
        assert [view.shape for view in reader.resolve(again)] == [(16, 1176)] * 4
        assert client.get(refs[1]) == IMAGES[1]
    with EmbeddedNode(memory_bytes=16 << 20, roots={"d": [f"{verl}/*.parquet"]}) as fresh:
        with Client(fresh.uri, timeout_s=30) as client, Reader(fresh.uri, timeout_s=30) as reader:
            assert [view.shape for view in reader.resolve(again)] == [(16, 1176)] * 4
            assert client.get(refs[0]) == IMAGES[0]
            assert not any(isinstance(item, BadMedia) for item in client.derive(refs, RECIPE))
