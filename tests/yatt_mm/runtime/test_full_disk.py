"""Tests that each file of a run that cannot be written is named in one line. `/dev/full` is a disk without room."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.yatt_mm import runs
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import DiskError
from yatt_mm.common.writing import writing
from yatt_mm.config.run_config import load_config
from yatt_mm.reporting.report import Reporter
from yatt_mm.reporting.tensorboard_file import TensorboardFile
from yatt_mm.runtime import run_dir

STEP: dict[str, Any] = {"kind": "step", "step": 1, "reward/mean": 0.5}
RECORDS: dict[str, dict[str, Any]] = {
    "metrics.jsonl": STEP,
    "quarantine.jsonl": {
        "kind": "quarantine",
        "step": 1,
        "key": "k",
        "shard": "s",
        "reason": "r",
        "is_filtered": False,
    },
    "placement.jsonl": {"kind": "placement", "step": 1},
}


def reporter(folder: Path, first_step: int = 0) -> Reporter:
    return Reporter(folder, num_steps=2, first_step=first_step, judges=(), console=Console(file=io.StringIO()))


def one_line(path: Path) -> str:
    return (
        rf"^cannot write {path}: No space left on device; make room on its disk; --resume then goes on from the last "
    )


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_of_records_is_named(tmp_path: Path, name: str) -> None:
    written = reporter(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/full")
    written._files[name] = (tmp_path / name).open("a")
    with pytest.raises(DiskError, match=one_line(tmp_path / name)):
        written.take(dict(RECORDS[name]))


def test_the_timeline_is_named(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=one_line(tmp_path / "timeline.json")):
        reporter(tmp_path)


def test_the_file_of_tensorboard_is_named(tmp_path: Path) -> None:
    file = TensorboardFile(tmp_path)
    wanted = r"^cannot write .*/events.out.tfevents.*: No space left on device; make room"
    with file._file, Path("/dev/full").open("wb", buffering=0) as full:
        file._records._writer = full
        with pytest.raises(DiskError, match=wanted):
            file.add_metrics({"step": 1, "reward/mean": 0.5})


def test_the_state_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(root=tmp_path, keep=1)
    state = checkpoints.begin(3) / "state.json"
    state.symlink_to("/dev/full")
    with pytest.raises(DiskError, match=one_line(state)):
        checkpoints.commit(3, {"step": 3})
    assert checkpoints.steps() == []


def test_the_config_of_a_run_is_named(tmp_path: Path) -> None:
    path, *overrides = runs.arguments(tmp_path, tmp_path, "full", "train.steps=1")
    config = load_config(runs.ROOT / path, overrides)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=one_line(config.run_dir / "config.yaml")):
        run_dir.prepare(config, None, 0, Console(file=io.StringIO()))


def test_an_error_names_the_innermost_file_and_gives_no_advice_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught, writing(tmp_path), writing(tmp_path / "file"):
        raise FileNotFoundError(2, "No such file or directory")
    assert str(caught.value) == f"cannot write {tmp_path / 'file'}: No such file or directory"
