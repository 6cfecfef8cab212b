"""Tests of a run's folder: what is said when a run goes on, and where an earlier one is moved."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.yatt_mm import runs
from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint
from yatt_mm.common.errors import CheckpointError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.runtime import run_dir


def config_of(folder: Path, *overrides: str) -> Config:
    path, *rest = runs.arguments(folder, folder, "one", "train.steps=1", *overrides)
    return load_config(runs.ROOT / path, rest)


def said(config: Config, checkpoint: Path | None, step: int) -> str:
    run_dir.prepare(config, checkpoint, step, Console(file=(file := io.StringIO()), width=200))
    return file.getvalue()


def test_changes_are_those_since_the_checkpoint_however_often_the_run_was_tried_again(tmp_path: Path) -> None:
    first, other = config_of(tmp_path), config_of(tmp_path, "run.seed=5", "train.lr=0.5", "eval.every=7")
    checkpoints = Checkpoints(root=first.run_dir / "checkpoints", keep=1)
    checkpoints.begin(1)
    checkpoint = checkpoints.commit(1, {"step": 1, "config": first.model_dump(mode="json")})
    assert said(first, checkpoint, 1) == ""
    for _ in range(2):
        changes = said(other, checkpoint, 1).splitlines()
        assert changes == [
            f"changed since the checkpoint: run.seed was {first.run.seed}, is 5",
            f"changed since the checkpoint: train.lr was {first.train.lr}, is 0.5",
        ]
    assert said(first, checkpoint, 1) == "", "the last attempt does not count"


def test_the_best_model_by_another_metric_or_of_a_later_step_is_moved_aside(tmp_path: Path) -> None:
    new = "eval.sets.new={path: new.tar, num_samples: 2, temperature: 1, metrics: [pass@2]}"
    first, other = (config_of(tmp_path, new, f"eval.keep_best=eval/{name}") for name in ("accuracy", "new/pass@2"))
    checkpoints = Checkpoints(root=first.run_dir / "checkpoints", keep=1)
    checkpoints.begin(2)
    checkpoint = checkpoints.commit(2, {"step": 2, "config": first.model_dump(mode="json")})
    (first.run_dir / "metrics.jsonl").write_text('{"step": 2, "best/step": 1}\n')
    for config, step, why in (
        (first, 2, None),
        (other, 2, "the best by eval/accuracy"),
        (first, 0, "of a later step"),
    ):
        (first.run_dir / "best").mkdir(exist_ok=True)
        text = said(config, checkpoint, step)
        assert (first.run_dir / "best").is_dir() == (why is None)
        moved = list(first.run_dir.glob("best.*"))
        assert len(moved) == (why is not None) and (why is None or why in text)
        for folder in moved:
            assert f"was moved to {folder}" in text
            folder.rmdir()


def test_an_earlier_run_is_moved_and_the_console_says_where(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text("{}")
    text = said(config, None, 0)
    (moved,) = config.run_dir.parent.glob("one.*")
    assert f"{config.run_dir} held an earlier run, which is in {moved} now" in text
    assert (moved / "metrics.jsonl").is_file() and not (config.run_dir / "metrics.jsonl").exists()


def test_a_new_folder_is_for_its_user_alone_and_one_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with run_dir.locked(config):
        (lock,) = config.run_dir.parent.glob(".*.lock")
        assert lock.stat().st_mode & 0o777 == 0o600, "another user could lock it"
        said(config, None, 0)
    assert config.run_dir.stat().st_mode & 0o777 == 0o700
    config.run_dir.chmod(0o750)
    said(config, None, 0)
    assert config.run_dir.stat().st_mode & 0o777 == 0o750


def test_checkpoints_in_another_folder_go_with_their_run(tmp_path: Path) -> None:
    elsewhere = tmp_path / "fast"
    config = config_of(tmp_path, f"checkpoint.dir={elsewhere}")
    assert said(config, None, 0) == ""
    checkpoints = Checkpoints(root=config.run_dir / "checkpoints", keep=1)
    checkpoints.begin(2)
    checkpoint = checkpoints.commit(2, {"step": 2, "config": config.model_dump(mode="json")})
    (own,) = elsewhere.iterdir()
    assert [path.name for path in own.iterdir()] == ["step_000002"] and own.name.startswith("one.")
    assert said(config, checkpoint, 2) == "" and list(elsewhere.iterdir()) == [own], "it goes on there"
    moved = config_of(tmp_path, f"checkpoint.dir={tmp_path / 'other'}")
    assert f"but this run has its checkpoints in {own}; it goes on there" in said(moved, checkpoint, 2)
    (config.run_dir / "metrics.jsonl").write_text("")
    later = config_of(tmp_path, f"checkpoint.dir={tmp_path / 'other'}")
    assert "with --resume this run would have gone on with it" in said(later, None, 0)
    (aside,) = config.run_dir.parent.glob("one.*")
    assert (aside / "checkpoints" / "step_000002").is_dir(), "the earlier run has its own"
    assert not list((later.run_dir / "checkpoints").iterdir())


def test_checkpoints_whose_filesystem_is_gone_are_not_taken_for_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"checkpoint.dir={tmp_path / 'fast'}")
    said(config, None, 0)
    (tmp_path / "fast").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"is a link to .*, which is not there; mount its filesystem"):
        find_checkpoint(config.run_dir, "auto", pytest.fail)
