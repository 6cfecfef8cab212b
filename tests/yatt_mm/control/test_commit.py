"""Tests of the commit of a checkpoint: it waits for all ranks, and for no controller."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import DiskError, WorkerError
from yatt_mm.common.manifest import check_files, note_written, record_file
from yatt_mm.control.commit import Commit

DEADLINE_S = 60.0


def write(folder: Path, rank: int) -> None:
    """Write the part of a rank."""
    part = folder / f"part-{rank}"
    part.write_bytes(bytes(100))
    note_written(part, record_file(part))


def begun(root: Path) -> tuple[Checkpoints, Path, Commit]:
    """Begin a checkpoint of two ranks."""
    checkpoints = Checkpoints(root=root / "checkpoints", keep=1)
    folder = checkpoints.begin(3)
    return checkpoints, folder, Commit(checkpoints, 3, {"step": 3}, num_ranks=2, best=None)


def test_a_checkpoint_counts_as_soon_as_all_ranks_have_written_while_no_controller_waits(tmp_path: Path) -> None:
    checkpoints, folder, commit = begun(tmp_path)
    write(folder, 0)
    time.sleep(0.2)
    assert checkpoints.steps() == []
    write(folder, 1)
    until = time.monotonic() + DEADLINE_S
    while not commit.seconds and time.monotonic() < until:
        time.sleep(0.01)
    assert checkpoints.steps() == [3] and commit.seconds > 0.2
    check_files(checkpoints.folder(3))
    commit.finish(deadline_s=0.0)


def test_a_commit_that_is_late_says_how_many_ranks_have_written_and_is_given_up(tmp_path: Path) -> None:
    checkpoints, folder, commit = begun(tmp_path)
    write(folder, 0)
    with pytest.raises(
        WorkerError, match=r"of step 3 was not committed in 0\.1 s .* 1 of 2 training ranks have written"
    ):
        commit.finish(deadline_s=0.1)
    commit._thread.join(DEADLINE_S)
    write(folder, 1)
    time.sleep(0.2)
    assert not commit._thread.is_alive() and checkpoints.steps() == []


def test_what_the_disk_refuses_is_told_to_who_waits(tmp_path: Path) -> None:
    _, folder, commit = begun(tmp_path)
    (folder / "manifest.json").mkdir()
    for rank in range(2):
        write(folder, rank)
    with pytest.raises(DiskError, match=r"cannot write .*\.partial_step_000003: Is a directory"):
        commit.finish(deadline_s=DEADLINE_S)
