"""Tests of the folder that keeps indices of tars: it is used while the tar is the same, and never trusted otherwise."""

import logging
from pathlib import Path

import pytest

from dataplane.core.refs import Sample
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.formats import tar_index
from tests.dataplane.shards import write_tar

MEMBERS = {f"{at:03d}.{ext}": bytes([at]) * (at + 1) for at in range(9) for ext in ("png", "txt")}


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the tars whose headers were read."""
    seen: list[str] = []
    index = tar_index.index_tar

    def counted(file, refuse):  # type: ignore[no-untyped-def]
        seen.append(file.path)
        return index(file, refuse)

    monkeypatch.setattr(tar_index, "index_tar", counted)
    return seen


def read(path: Path, folder: Path) -> list[Sample]:
    """Return all samples that a node with this folder of indices finds."""
    catalog = Catalog({"d": [str(path)]}, "node", index_dir=folder)
    return catalog.samples("d", range(catalog.ingest("d").num_samples))


def test_a_later_node_reads_no_headers_and_finds_the_same(tmp_path: Path, scans: list[str]) -> None:
    path, folder = write_tar(tmp_path / "a.tar", MEMBERS | {"\udce9.png": b"x"}), tmp_path / "kept" / "indices"
    first = read(path, folder)
    assert len(first) == 10 and scans == [str(path)]
    assert read(path, folder) == first and scans == [str(path)]
    assert read(path, tmp_path / "other") == first and len(scans) == 2


def test_a_tar_that_changed_or_moved_is_indexed_again(tmp_path: Path, scans: list[str]) -> None:
    path, folder = write_tar(tmp_path / "a.tar", MEMBERS), tmp_path / "indices"
    read(path, folder)
    write_tar(path, {f"x{name}": data for name, data in MEMBERS.items()})
    assert read(path, folder)[0].key == "x000" and len(scans) == 2
    copy = tmp_path / "b.tar"
    copy.write_bytes(path.read_bytes())
    assert read(copy, folder)[0].key == "x000" and len(scans) == 3


@pytest.mark.parametrize("damage", [b"", b"no index", b"PK"])
def test_a_damaged_index_is_made_again(
    tmp_path: Path, scans: list[str], damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = write_tar(tmp_path / "a.tar", MEMBERS), tmp_path / "indices"
    first = read(path, folder)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage == b"PK" else damage)
    with caplog.at_level(logging.WARNING):
        assert read(path, folder) == first and len(scans) == 2
    assert "is indexed again" in caplog.text
    assert read(path, folder) == first and len(scans) == 2


def test_a_torn_tar_is_not_kept(tmp_path: Path, scans: list[str]) -> None:
    path, folder = write_tar(tmp_path / "a.tar", MEMBERS), tmp_path / "indices"
    path.write_bytes(path.read_bytes()[:4000])
    read(path, folder)
    read(path, folder)
    assert len(scans) == 2 and not folder.exists()


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, scans: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = write_tar(tmp_path / "a.tar", MEMBERS), tmp_path / "file" / "indices"
    folder.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(read(path, folder)) == 9 == len(read(path, folder))
    assert len(scans) == 2 and "cannot be saved" in caplog.text
