"""Tests of which begun steps a run goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm.generation.fakes import config_of
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.runtime.begun_start import counts, find_begun


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 2 and 4, and the begun steps 3 to 6 of the same run."""
    checkpoints = Checkpoints(root=tmp_path, keep=9)
    for step in (2, 4):
        checkpoints.begin(step)
        checkpoints.commit(step, {"step": step})
    for step in (3, 4, 5, 6):
        (checkpoints.begun.begin(step) / "groups-0.arrow").write_text("x")
        config = config_of().model_dump(mode="json")
        checkpoints.begun.commit(step, is_whole=True, sampling={}, config=config)
    return tmp_path


def test_it_goes_on_with_those_after_the_newest_checkpoint(root: Path) -> None:
    assert list(find_begun(config_of(), root / "step_000004", "auto", pytest.fail)) == [5, 6]
    assert list(find_begun(config_of(), root / "step_000004", str(root / "step_000004"), pytest.fail)) == [5, 6]


def test_an_earlier_checkpoint_goes_on_with_them_if_the_newest_is_damaged_but_not_if_it_is_named(root: Path) -> None:
    assert list(find_begun(config_of(), root / "step_000002", "auto", pytest.fail)) == [3, 4, 5, 6]
    assert find_begun(config_of(), root / "step_000002", str(root / "step_000002"), pytest.fail) == {}


@pytest.mark.parametrize(
    "override",
    [
        "controllers.num=3",
        "eval.every=3",
        "rollout.max_num_seqs=8",
        "faults.max_restarts=0",
        "reward.num_workers=3",
    ],
)
def test_what_responses_do_not_depend_on_may_change(override: str, root: Path) -> None:
    assert list(find_begun(config_of(override), root / "step_000004", "auto", pytest.fail)) == [5, 6]


def test_the_number_of_steps_may_change_unless_the_learning_rate_falls_until_the_last_one() -> None:
    assert not counts("train.steps", config_of())
    assert not counts("train.steps", config_of("train.lr_final_frac=null", "train.lr_schedule=constant"))
    assert counts("train.steps", config_of("train.lr_final_frac=0.5"))
    assert counts("train.steps", config_of("train.lr_final_frac=null", "train.lr_schedule=cosine"))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.temperature=0.5", "rollout.temperature"),
        ("rollout.group_size=8", "rollout.group_size"),
        ("train.lr=1", "train.lr"),
        ("reward.function=m:f", "reward.function"),
        ("reward.weight=2", "reward.weight"),
        ("algorithm.name=rloo", "algorithm.name"),
        ("model.dtype=bfloat16", "model.dtype"),
        ("data.shuffle_answers=true", "data.shuffle_answers"),
        ("sampling.over_dispatch=2", "sampling.over_dispatch"),
        ("reference.renew_every=3", "reference.renew_every"),
        ("critic.lr=1", "critic.lr"),
        ("run.seed=9", "run.seed"),
    ],
)
def test_they_are_sampled_again_if_what_they_depend_on_has_changed(override: str, key: str, root: Path) -> None:
    said: list[str] = []
    assert find_begun(config_of(override), root / "step_000004", "auto", said.append) == {}
    assert said == [f"the responses of step 5 are sampled again, because {key} has changed"]
