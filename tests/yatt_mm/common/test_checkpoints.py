"""Tests that a checkpoint counts once it is committed, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint, read_state
from yatt_mm.common.errors import CheckpointError


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    (checkpoints.begin(1) / "weights").write_text("x")
    checkpoints.commit(1, {"step": 1})
    (checkpoints.begin(2) / "weights").write_text("y")
    assert checkpoints.steps() == [1]
    assert find_checkpoint(tmp_path, "auto").name == "step_000001"
    checkpoints.clear_partial()
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_000001"]


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step})
    assert checkpoints.steps() == [2, 3]
    assert read_state(find_checkpoint(tmp_path, "auto")) == {"step": 3}


def test_the_best_one_stays_until_another_is_better(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=1)
    kept = []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step}, best=best)
        kept.append(checkpoints.steps())
    assert kept == [[1], [2], [2, 3], [2, 4], [5], [5, 6]]


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        find_checkpoint(tmp_path, "auto")
    with pytest.raises(CheckpointError, match=r"has no state\.json"):
        find_checkpoint(tmp_path, str(tmp_path))


def test_a_run_that_was_moved_aside_is_named_where_its_checkpoint_is_looked_for(tmp_path: Path) -> None:
    for name, steps in (("run.20261124-010203", [1]), ("run.20261125-010203", [2]), ("run.20261126-010203", [])):
        for step in steps:
            checkpoints = Checkpoints(root=tmp_path / name / "checkpoints", keep=1)
            checkpoints.begin(step)
            checkpoints.commit(step, {})
    with pytest.raises(CheckpointError, match=r"moved to .*/run\.20261125-010203: .* move it back to .*/run first"):
        find_checkpoint(tmp_path / "run", "auto")


def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step})
    aside = checkpoints.set_aside_after(1)
    assert aside is not None
    assert checkpoints.steps() == [1]
    assert sorted(path.name for path in aside.iterdir()) == ["step_000002", "step_000003"]
    assert checkpoints.set_aside_after(1) is None
