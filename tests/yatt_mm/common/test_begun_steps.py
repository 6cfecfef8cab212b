"""Tests of begun steps on disk: which of them a run goes on with, and when they go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from yatt_mm.common.begun_steps import BegunSteps
from yatt_mm.common.checkpoints import Checkpoints


def save(begun: BegunSteps, step: int, *, is_whole: bool = True, num_controllers: int = 1) -> None:
    for controller in range(num_controllers):
        (begun.begin(step) / f"groups-{controller}.arrow").write_text(f"groups of step {step}")
    begun.commit(step, is_whole=is_whole, sampling={"order": step}, config={"run": {"seed": 0}})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_goes_on_with_the_whole_steps_right_after_its_checkpoint_and_with_a_part_of_the_next_one(
    tmp_path: Path,
) -> None:
    begun = BegunSteps(root=tmp_path)
    for step in (3, 4, 6):
        save(begun, step)
    assert [one.step for one in begun.after(2, pytest.fail)] == [3, 4], "step 5 is not there"
    save(begun, 5, is_whole=False)
    found = begun.after(2, pytest.fail)
    assert [(one.step, one.is_whole) for one in found] == [(3, True), (4, True), (5, False)]
    assert found[0].sampling == {"order": 3} and found[0].config == {"run": {"seed": 0}}
    assert begun.is_whole(4) and not begun.is_whole(5) and not begun.is_whole(9)
    save(begun, 5)
    assert [one.step for one in begun.after(2, pytest.fail)] == [3, 4, 5, 6], "it took the place of the part"
    assert begun.after(6, pytest.fail) == []


def test_a_half_written_step_does_not_count_and_a_damaged_one_ends_what_a_run_goes_on_with(tmp_path: Path) -> None:
    begun = BegunSteps(root=tmp_path)
    (begun.begin(1) / "groups-0.arrow").write_text("x")
    assert begun.steps() == [] and begun.after(0, pytest.fail) == []
    for step in (1, 2, 3):
        save(begun, step)
    path = begun.folder(2) / "groups-0.arrow"
    path.write_text("groups of step 7")
    said: list[str] = []
    assert [one.step for one in begun.after(0, said.append)] == [1]
    assert len(said) == 1 and str(path) in said[0] and said[0].endswith("; the responses of step 2 are sampled again")


def test_a_step_goes_when_no_kept_checkpoint_needs_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    for step in range(1, 8):
        save(checkpoints.begun, step)
        if step % 2 == 0:
            checkpoints.begin(step)
            checkpoints.commit(step, {"step": step})
    assert checkpoints.steps() == [4, 6]
    assert checkpoints.begun.steps() == [5, 6, 7], "the run may go on from step 4, if that of step 6 is damaged"


def test_a_step_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    checkpoints = Checkpoints(root=tmp_path, keep=1)
    save(checkpoints.begun, 1)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.begun.drop_until(1)
    monkeypatch.undo()
    assert names(tmp_path) == [".dropped_begun_000001"]
    checkpoints.begun.begin(2)
    checkpoints.clear_partial()
    assert names(tmp_path) == []


def test_what_a_run_does_not_go_on_with_is_set_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path, keep=2)
    checkpoints.begin(2)
    checkpoints.commit(2, {"step": 2})
    for step in (3, 4):
        save(checkpoints.begun, step)
    aside = checkpoints.set_aside_after(2, but=(3,))
    assert aside is not None and names(aside) == ["begun_000004"]
    assert checkpoints.begun.steps() == [3]


@pytest.mark.parametrize("num_controllers", [1, 2, 3, 5])
def test_any_number_of_controllers_shares_the_files_out(tmp_path: Path, num_controllers: int) -> None:
    begun = BegunSteps(root=tmp_path)
    save(begun, 1, num_controllers=12)
    (found,) = begun.after(0, pytest.fail)
    shares = [[path.name for path in found.files(c, num_controllers)] for c in range(num_controllers)]
    assert shares[0][:2] == ["groups-0.arrow", f"groups-{num_controllers}.arrow"], "in the order of their numbers"
    assert sorted(name for share in shares for name in share) == sorted(f"groups-{c}.arrow" for c in range(12))
