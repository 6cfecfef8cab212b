"""Tests of what a run says at its start: about too few samples, and about a run that is finished already."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.yatt_mm import runs
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.runtime.launch import launch
from yatt_mm.runtime.start_point import _told, _warnings


def config_of(folder: Path, model: Path, *overrides: str) -> Config:
    path, *rest = runs.arguments(folder, model, "started", "train.steps=4", *overrides)
    return load_config(runs.ROOT / path, rest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_shard(tmp_path / "train-000000.tar", range(6))
    runs.write_shard(tmp_path / "eval-000000.tar", range(1000, 1003))
    return tmp_path


def test_more_prompts_per_step_than_samples_and_held_out_samples_in_training_are_told(folder: Path) -> None:
    assert list(_warnings(config_of(folder, folder), num_train=8)) == []
    (few,) = _warnings(config_of(folder, folder), num_train=6)
    assert few.startswith("train.prompts_per_step is 8, more than the 6 training samples")
    same = f"data.eval={folder}/train-*.tar"
    (both,) = _warnings(config_of(folder, folder, same), num_train=8)
    assert both.startswith("data.train and data.eval have 1 file(s) in common, such as ")


def test_a_finished_run_that_is_resumed_says_so_and_starts_nothing(folder: Path, tiny_dir: Path) -> None:
    config, console = config_of(folder, tiny_dir), Console(file=io.StringIO(), width=200)
    checkpoints = Checkpoints(root=config.run_dir / "checkpoints", keep=1)
    checkpoints.begin(4)
    checkpoints.commit(4, {"step": 4})
    assert launch(config, resume="auto", console=console) == {}
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "is finished: " in said and "is of step 4, and train.steps is 4; raise train.steps to go on" in said
    assert not config.log_dir.exists()


def test_a_held_out_set_that_joins_at_a_resume_tells_of_its_bad_samples_and_the_others_are_not_told_again(
    folder: Path,
) -> None:
    sets = "eval.sets={clips: {path: clips.tar}, scans: {path: scans.tar}}"
    state = {"config": config_of(folder, folder, sets).model_dump(mode="json")}
    assert _told(config_of(folder, folder, sets), None) == frozenset()
    assert _told(config_of(folder, folder, sets), state) == {"eval", "clips", "scans"}
    joined = "eval.sets={clips: {path: clips.tar}, scans: {path: more.tar}, new: {path: new.tar}}"
    assert _told(config_of(folder, folder, joined), state) == {"eval", "clips"}
    assert _told(config_of(folder, folder, sets, "data.eval=other.tar"), state) == {"clips", "scans"}
    assert _told(config_of(folder, folder, sets), {"step": 3}) == frozenset()
