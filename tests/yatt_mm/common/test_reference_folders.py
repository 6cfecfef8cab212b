"""Tests of which folder has the reference of a step, and which folders are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from yatt_mm.common.reference_folders import ReferenceFolders


def folders(root: Path, every: int) -> ReferenceFolders:
    return ReferenceFolders(first=root / "first", renewed=root / "renewed", every=every)


def test_a_policy_is_the_reference_of_the_steps_after_it(tmp_path: Path) -> None:
    found = folders(tmp_path, 3)
    names = [found.of(step).name for step in range(1, 9)]
    assert names == [*["first"] * 3, *["step_000003"] * 3, *["step_000006"] * 2]
    assert [step for step in range(8) if found.is_due(step)] == [3, 6]
    assert found.of(4) == found.folder(3), "it is read where it was written"


def test_without_a_period_the_first_one_stays(tmp_path: Path) -> None:
    found = folders(tmp_path, 0)
    assert found.of(1) == found.of(1000) == tmp_path / "first"
    assert not any(map(found.is_due, range(10)))


@pytest.mark.parametrize(("oldest", "kept"), [(0, [3, 6, 9]), (5, [3, 6, 9]), (6, [6, 9]), (8, [6, 9]), (9, [9])])
def test_what_no_checkpoint_needs_is_removed(tmp_path: Path, oldest: int, kept: list[int]) -> None:
    found = folders(tmp_path, 3)
    found.first.mkdir()
    for step in (3, 6, 9):
        found.folder(step).mkdir(parents=True)
    found.prune(oldest)
    assert sorted(found.renewed.iterdir()) == [found.folder(step) for step in kept]
    assert found.first.is_dir()


def test_a_checkpoint_of_another_run_brings_its_reference(tmp_path: Path) -> None:
    found = folders(tmp_path / "run", 3)
    other = tmp_path / "other"
    (other / "reference" / "step_000003").mkdir(parents=True)
    (other / "reference" / "step_000003" / "config.json").write_text("of the other run")
    found.folder(3).mkdir(parents=True)
    found.bring(4, other / "checkpoints" / "step_000004")
    assert (found.folder(3) / "config.json").read_text() == "of the other run"
    found.bring(2, other / "checkpoints" / "step_000002")
    assert not found.first.exists(), "the first one is where it was"


def test_references_go_aside_with_their_checkpoints_and_come_back_with_them(tmp_path: Path) -> None:
    found = ReferenceFolders(first=tmp_path / "first", renewed=tmp_path / "run" / "reference", every=3)
    for step in (3, 6):
        found.folder(step).mkdir(parents=True)
        (found.folder(step) / "config.json").write_text(f"step {step}")
    aside = tmp_path / "run" / "checkpoints" / "abandoned-1"
    found.set_aside_after(4, aside)
    assert [path.name for path in found.renewed.iterdir()] == ["step_000003"]
    found.bring(7, aside / "step_000007")
    assert (found.folder(6) / "config.json").read_text() == "step 6"
    found.bring(4, tmp_path / "run" / "checkpoints" / "step_000004")
    assert (found.folder(3) / "config.json").read_text() == "step 3", "that of the run itself stays"
