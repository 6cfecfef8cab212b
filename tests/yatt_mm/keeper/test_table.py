"""Tests of the files of kept rollouts."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.yatt_mm.keeper.rows import picture, row
from yatt_mm.keeper.table import by_prompt, drop_after, kept_steps, read_rows, table_path, write_rows
from yatt_mm.protocol.kept import SPLITS


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [row(0, 0), row(0, 1, advantage=None), row(3, 0, split="eval", media=[], logprob_mean=None)]
    write_rows(tmp_path / "new" / "t.parquet", rows)
    assert read_rows(tmp_path / "new" / "t.parquet") == rows
    assert [len(group) for split in SPLITS for group in by_prompt(rows, split)] == [2, 1]


def test_a_picture_is_stored_once_however_many_rows_show_it(tmp_path: Path) -> None:
    """Test with more pictures than Parquet's usual list of distinct values holds."""
    num_pictures, num_rows = 300, 16
    rows = [row(position, place) for position in range(num_pictures) for place in range(num_rows)]
    write_rows(tmp_path / "t.parquet", rows)
    once = sum(len(picture(position)) for position in range(num_pictures))
    assert once > 1 << 20
    assert 0.8 * once < (tmp_path / "t.parquet").stat().st_size < 1.2 * once


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_path(tmp_path, 1)
    write_rows(path, [row(0, 0)])

    def full(table: Any, where: Path, **settings: Any) -> None:
        where.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        write_rows(path, [row(1, 0)])
    monkeypatch.undo()
    assert read_rows(path) == [row(0, 0)] and [file.name for file in path.parent.iterdir()] == ["step_1.parquet"]


def test_files_of_later_steps_are_dropped_and_no_other_file(tmp_path: Path) -> None:
    for step in (0, 2, 10):
        write_rows(table_path(tmp_path, step), [row(0, 0)])
    (tmp_path / "rollouts" / "mine.parquet").write_bytes(b"mine")
    drop_after(tmp_path, 2)
    assert kept_steps(tmp_path) == [0, 2]
    assert (tmp_path / "rollouts" / "mine.parquet").exists()
    drop_after(tmp_path / "no" / "such", 0)


def test_the_first_prompts_of_each_split_can_be_read_alone(tmp_path: Path) -> None:
    rows = [
        row(position, place, split=split) for split in ("train", "eval") for position in (4, 7, 9) for place in (0, 1)
    ]
    write_rows(tmp_path / "t.parquet", rows)
    found = read_rows(tmp_path / "t.parquet", max_prompts=2)
    wanted = [(split, position, place) for split in ("train", "eval") for position in (4, 7) for place in (0, 1)]
    assert [(each["split"], each["position"], each["place"]) for each in found] == wanted
    assert "token_ids" not in found[0] and found[0]["media"] == rows[0]["media"]
