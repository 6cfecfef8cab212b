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
