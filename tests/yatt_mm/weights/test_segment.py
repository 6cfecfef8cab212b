"""Tests that a weight segment gives back what was written, whole or not at all."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yatt_mm.weights import segment_writer
from yatt_mm.weights.segment import MappedSegment, SegmentError, read_segment
from yatt_mm.weights.segment_writer import SegmentWriter, write_segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tensors_of(shapes: list[tuple[int, ...]], seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layer.{i}", torch.randint(0, 100, shape, generator=generator).to(DTYPES[i % len(DTYPES)]))
        for i, shape in enumerate(shapes)
    ]


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12),
    seed=st.integers(0, 2**31),
)
def test_every_tensor_comes_back_bit_for_bit_also_when_written_over(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], seed: int
) -> None:
    path = tmp_path_factory.mktemp("segment") / "weights"
    for version in (3, 7):
        named = tensors_of(shapes, seed + version)
        write_segment(path, named, version=version)
        found = list(read_segment(path, version))
        assert [name for name, _ in found] == [name for name, _ in named]
        for (_, wanted), (_, tensor) in zip(named, found, strict=True):
            assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
            assert torch.equal(tensor, wanted)


def test_tensors_lie_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    write_segment(tmp_path / "weights", tensors_of([(3,), (5, 7), (1,)], 0))
    addresses = [tensor.data_ptr() for _, tensor in read_segment(tmp_path / "weights")]
    assert all(address % 64 == 0 for address in addresses)


def test_a_view_that_is_no_contiguous_tensor_is_written_as_it_reads(tmp_path: Path) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    write_segment(tmp_path / "weights", [("w", transposed), ("b", torch.tensor(2.5))])
    found = dict(read_segment(tmp_path / "weights"))
    assert torch.equal(found["w"], transposed)
    assert found["b"].shape == () and found["b"].item() == 2.5


def test_views_outlive_the_file_and_writing_into_one_changes_nothing_for_others(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_segment(path, [("w", torch.ones(8))])
    mine = dict(read_segment(path))["w"]
    mine.zero_()
    assert torch.equal(dict(read_segment(path))["w"], torch.ones(8))
    path.unlink()
    assert torch.equal(mine, torch.zeros(8))


def test_the_same_model_is_written_in_place_and_another_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    inodes = []
    for tensor in (torch.ones(8), torch.zeros(8), torch.zeros(4, 2)):
        write_segment(path, [("w", tensor)])
        inodes.append(path.stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_segment_is_refused_from_the_begin_of_writing_to_its_seal(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    metas = [segment_writer._Meta("w", torch.float32, (8,))]
    SegmentWriter.prepare(path, metas)
    with pytest.raises(SegmentError, match="its writer died"):
        MappedSegment(path)
    writer = SegmentWriter(path, metas)
    for version in (0, 1):
        writer.begin()
        writer.begin()  # the writer before died here
        with pytest.raises(SegmentError, match="is being written"):
            MappedSegment(path)
        writer.seal(version)
        assert MappedSegment(path).header.version == version


def test_a_reader_that_was_overtaken_by_a_writer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_segment(path, [("w", torch.ones(8)), ("v", torch.ones(8))], version=1)
    reading = read_segment(path, 1)
    next(reading)
    write_segment(path, [("w", torch.zeros(8)), ("v", torch.zeros(8))], version=1)
    with pytest.raises(SegmentError, match="written while it was read"):
        list(reading)


def test_another_version_than_the_wanted_is_refused(tmp_path: Path) -> None:
    write_segment(tmp_path / "weights", [("w", torch.ones(8))], version=4)
    with pytest.raises(SegmentError, match="version 4, but version 5 is needed"):
        next(read_segment(tmp_path / "weights", 5))


def test_a_name_that_comes_twice_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'w' comes twice"):
        write_segment(tmp_path / "weights", [("w", torch.ones(1)), ("w", torch.ones(1))])
    with pytest.raises(ValueError, match=r"'w' is torch\.complex64"):
        write_segment(tmp_path / "weights", [("w", torch.ones(1, dtype=torch.complex64))])
    assert list(tmp_path.iterdir()) == []


def test_a_segment_for_which_there_is_no_room_is_refused_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_segment(tmp_path / "weights", [("w", torch.ones(8))])
    assert list(tmp_path.iterdir()) == []


def test_a_cut_off_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_segment(path, [("w", torch.ones(64))])
    whole = path.read_bytes()
    huge_index = whole[:32] + struct.pack("<Q", 2**40) + whole[40:]
    for broken in (whole[:-1], whole[:4000], whole[:10], b"", b"x" * len(whole), huge_index):
        path.write_bytes(broken)
        with pytest.raises(SegmentError):
            list(read_segment(path))
