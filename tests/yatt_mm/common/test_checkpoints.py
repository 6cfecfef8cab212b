"""Tests that a checkpoint counts once it is committed, and not before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint, read_state
from yatt_mm.common.errors import CheckpointError


def found(run_dir: Path) -> str:
    """Return the name of the checkpoint with which a run goes on; nothing is to be said about it."""
    folder = find_checkpoint(run_dir, "auto", pytest.fail)
    assert folder is not None
    return folder.name


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    (checkpoints.begin(1) / "weights").write_text("x")
    checkpoints.commit(1, {"step": 1})
    (checkpoints.begin(2) / "weights").write_text("y")
    assert checkpoints.steps() == [1]
    assert found(tmp_path) == "step_000001"
    checkpoints.clear_partial()
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_000001"]


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step})
    assert checkpoints.steps() == [2, 3]
    assert read_state(checkpoints.root / found(tmp_path)) == {"step": 3}


def test_the_best_one_stays_until_another_is_better(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=1)
    kept = []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step}, best=best)
        kept.append(checkpoints.steps())
    assert kept == [[1], [2], [2, 3], [2, 4], [5], [5, 6]]


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=1)
    for step in (1, 2):
        (checkpoints.begin(step) / "weights").write_text("x")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            try:
                checkpoints.commit(step, {"step": step})
            except KeyboardInterrupt:
                assert step == 2
    assert checkpoints.steps() == [2], "the first one was being dropped when the process was killed"
    assert [path.name for path in checkpoints.root.glob(".dropped*")] == [".dropped_step_000001"]
    checkpoints.clear_partial()
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_000002"]
    checkpoints.begin(2)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.commit(2, {"step": 2, "again": True})
    assert read_state(checkpoints.root / found(tmp_path)) == {"step": 2, "again": True}


def killed(path: Path) -> None:
    raise KeyboardInterrupt


def test_the_checkpoint_before_a_damaged_one_is_used_and_this_is_said(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        (checkpoints.begin(step) / "weights").write_text(f"of step {step}")
        checkpoints.commit(step, {"step": step})
    newest, second, first = (checkpoints.root / f"step_{step:06d}" for step in (3, 2, 1))
    (newest / "weights").write_text("of step 4")
    (second / "state.json").write_text("{}")
    said: list[str] = []
    assert find_checkpoint(tmp_path, "auto", said.append) == first
    for line, file in zip(said, (newest / "weights", second / "state.json"), strict=True):
        assert line.startswith(f"{file} is damaged: ") and line.endswith("; trying the checkpoint before it")
    assert find_checkpoint(tmp_path, str(first), said.append) == first
    with pytest.raises(CheckpointError, match=r"step_000003/weights is damaged"):
        find_checkpoint(tmp_path, str(newest), said.append)
    (first / "weights").unlink()
    said.clear()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used; leave --resume out to start afresh"):
        find_checkpoint(tmp_path, "auto", said.append)
    assert said[-1] == f"{first / 'weights'} is missing", "there is none before it"


def test_where_nothing_is_a_run_begins_and_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    assert find_checkpoint(tmp_path, "auto", said.append) is None
    root = tmp_path / "checkpoints"
    assert said == [f"--resume: no checkpoint in {root} yet; the run starts from its beginning"]
    with pytest.raises(CheckpointError, match=r"has no manifest\.json, so it is not a committed checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path), said.append)


def test_a_run_that_was_moved_aside_is_named_where_its_checkpoint_is_looked_for(tmp_path: Path) -> None:
    for name, steps in (("run.20261124-010203", [1]), ("run.20261125-010203", [2]), ("run.20261126-010203", [])):
        for step in steps:
            checkpoints = Checkpoints(root=tmp_path / name / "checkpoints", keep=1)
            checkpoints.begin(step)
            checkpoints.commit(step, {})
    with pytest.raises(CheckpointError, match=r"moved to .*/run\.20261125-010203: .* move it back to .*/run first"):
        find_checkpoint(tmp_path / "run", "auto", pytest.fail)


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
