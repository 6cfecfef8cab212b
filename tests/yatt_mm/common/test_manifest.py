"""Tests that every change of a checkpoint's files is noticed, and named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from yatt_mm.common import manifest
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import (
    MANIFEST_FILE,
    FileRecord,
    check_files,
    note_written,
    num_written,
    record_file,
    write_manifest,
)

FILES = {
    "part-00000-of-00001.safetensors": bytes(range(256)) * 5,
    "state.json": b'{"step": 1}',
    "inner/common.pt": b"x" * 33,
    "empty": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=1)
    partial = checkpoints.begin(1)
    (partial / "inner").mkdir()
    for name, content in FILES.items():
        (partial / name).write_bytes(content)
    return checkpoints.commit(1, {"step": 1})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(at: int, bit: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 1 << bit
        path.write_bytes(content)

    return change


def refused(folder: Path, name: str, change: Callable[[Path], None]) -> str:
    """Return why a checkpoint is refused after one file was changed; the file is as before afterwards."""
    path = folder / name
    before = path.read_bytes()
    change(path)
    with pytest.raises(CheckpointError) as caught:
        check_files(folder)
    path.write_bytes(before)
    check_files(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["part-00000-of-00001.safetensors", "state.json", "inner/common.pt", MANIFEST_FILE])
def test_a_file_that_is_cut_short_gone_or_has_one_other_bit_is_named(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    assert f"{folder / name} is damaged" in refused(folder, name, cut)
    for at in {0, 1, size // 3, size // 2, size - 1}:
        for bit in (0, 3, 7):
            assert f"{folder / name} is damaged" in refused(folder, name, flip(at, bit)), (at, bit)
    gone = refused(folder, name, Path.unlink)
    assert f"{folder / name} is missing" in gone or f"{folder} has no {MANIFEST_FILE}" in gone


def test_a_checkpoint_of_another_version_is_named_as_such(folder: Path) -> None:
    text = (folder / MANIFEST_FILE).read_text()
    (folder / MANIFEST_FILE).write_text(text.replace('"format": 2', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"written by another version .*\(format 1; this one reads 2\)"):
        check_files(folder)


def test_no_byte_of_a_manifest_can_change_without_being_noticed(folder: Path) -> None:
    for at in range((folder / MANIFEST_FILE).stat().st_size):
        assert str(folder) in refused(folder, MANIFEST_FILE, flip(at, at % 8)), at


def test_longer_files_and_files_that_take_another_ones_place_are_noticed(folder: Path) -> None:
    assert "it has 34 bytes" in refused(folder, "inner/common.pt", lambda path: path.write_bytes(b"x" * 34))
    assert "is damaged" in refused(folder, "empty", lambda path: path.write_bytes(b"x"))
    other = refused(folder, "inner/common.pt", lambda path: path.write_bytes(b"y" * 33))
    assert "its content is not that of which manifest.json has the digest" in other
    (folder / "left by a file system").write_text("does no harm")
    check_files(folder)


def test_files_that_were_recorded_are_not_read_again_and_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * manifest.CHUNK_BYTES + b"w")
    record = record_file(tmp_path / "weights")
    assert record.nbytes == manifest.CHUNK_BYTES + 1
    (tmp_path / "weights").write_bytes(b"changed after it was recorded")
    note_written(tmp_path / "weights", record)
    assert num_written(tmp_path) == 1
    write_manifest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_FILE, "weights"]
    with pytest.raises(
        CheckpointError, match=f"weights is damaged: it has 29 bytes, and manifest.json says {record.nbytes}"
    ):
        check_files(tmp_path)
    note_written(tmp_path / "more", FileRecord(nbytes=1, blake3=""))
    with pytest.raises(FileNotFoundError, match="more was written and is gone"):
        write_manifest(tmp_path)


def test_a_file_that_the_disk_does_not_give_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> FileRecord:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "_read", read)
    with pytest.raises(CheckpointError, match=r"/empty cannot be read: Input/output error"):
        check_files(folder)
