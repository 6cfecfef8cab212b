"""Tests of the files of a checkpoint's tensors: other programs read them, and nothing is taken for what it is not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import record_file
from yatt_mm.training import part_files
from yatt_mm.training.boxes import Box
from yatt_mm.training.part_files import Parts, Piece, part_name, write_part

WHOLE = torch.arange(24.0).view(4, 6)


def piece(rows: slice, columns: slice, name: str = "weight/a") -> Piece:
    values = WHOLE[rows, columns]
    box = Box(offset=(rows.start, columns.start), shape=tuple(values.shape))
    return Piece(name=name, box=box, values=values.flatten())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the parts of two ranks: two rows and four of the columns, and the rest in two pieces."""
    first = [piece(slice(0, 2), slice(0, 4)), Piece(name="b", box=Box(offset=(0,), shape=(3,)), values=torch.ones(3))]
    second = [piece(slice(0, 2), slice(4, 6)), piece(slice(2, 4), slice(0, 6))]
    for rank, pieces in enumerate((first, second)):
        path = tmp_path / part_name(rank, 2)
        assert write_part(path, pieces, {"num_updates": "7"}) == record_file(path), "as if it was read again"
    return tmp_path


def test_a_box_is_put_together_from_the_files_that_have_a_part_of_it(folder: Path) -> None:
    parts = Parts(folder)
    assert parts.settings["num_updates"] == "7"
    assert parts.extent("weight/a") == (4, 6) and parts.extent("c") is None
    for box in (Box(offset=(1, 3), shape=(2, 3)), Box(offset=(0, 0), shape=(4, 6)), Box(offset=(3, 5), shape=(1, 1))):
        out = torch.full(box.shape, -1.0)
        assert parts.read("weight/a", box, out) == box.numel
        assert torch.equal(out, WHOLE[box.inside(Box(offset=(0, 0), shape=(4, 6)))])


def test_what_was_not_saved_is_not_filled(folder: Path) -> None:
    out = torch.full((2, 6), -1.0)
    assert Parts(folder).read("weight/a", Box(offset=(3, 0), shape=(2, 6)), out) == 6
    assert torch.equal(out, torch.stack([WHOLE[3], torch.full((6,), -1.0)]))
    assert Parts(folder).read("nothing", Box(offset=(0,), shape=(1,)), torch.empty(1)) == 0


def test_the_library_of_the_format_reads_them(folder: Path) -> None:
    found = load_file(folder / part_name(0, 2))
    assert found.keys() == {"weight/a@0,0", "b@0"}
    assert torch.equal(found["weight/a@0,0"], WHOLE[:2, :4])


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.5, float("nan"), 3e38], dtype=torch.bfloat16)
    write_part(tmp_path / part_name(0, 1), [Piece(name="w", box=Box(offset=(0,), shape=(4,)), values=values)], {})
    out = torch.zeros(4, dtype=torch.bfloat16)
    Parts(tmp_path).read("w", Box(offset=(0,), shape=(4,)), out)
    assert torch.equal(out.view(torch.int16), values.view(torch.int16))


def test_a_large_file_comes_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, on_disk = tmp_path / part_name(0, 1), list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: on_disk.append(path.stat().st_size))
    monkeypatch.setattr(part_files, "STRETCH_BYTES", 2 * WHOLE.nbytes)
    pieces = [piece(slice(0, 4), slice(0, 6), name=f"w{at}") for at in range(6)]
    whole = write_part(path, pieces, {}).nbytes
    header = whole - 6 * WHOLE.nbytes
    assert header >= 2 * WHOLE.nbytes, "it is a stretch of its own"
    assert on_disk == [*(header + num * WHOLE.nbytes for num in (0, 2, 4, 6)), whole]


def test_a_missing_or_damaged_file_is_named(folder: Path) -> None:
    path = folder / part_name(1, 2)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged: ")):
        Parts(folder)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"no finished checkpoint in .*: part-00001-of-00002.safetensors is missing"
    ):
        Parts(folder)
    path.write_bytes(content)
    (folder / part_name(0, 1)).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"part-00000-of-00001.safetensors is of another save"):
        Parts(folder)
