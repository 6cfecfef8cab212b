"""Tests that a rank which is killed while it writes a checkpoint, during training, leaves the previous checkpoint
usable."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import FileRecord, num_written
from yatt_mm.control.commit import Commit
from yatt_mm.training import rank_checkpoint

TP2 = Parallel(tp=2)
DEADLINE_S = 120.0


def train_until_killed(rank: int, model_dir: Path, run_dir: Path) -> None:
    """Commit a checkpoint, train, begin another one and continue training; then kill rank 1 when half of its file is
    written."""
    engine = jobs.build_engine(model_dir, TP2)
    checkpoints = Checkpoints(root=run_dir / "checkpoints", keep=2)
    jobs._steps(engine, 1)
    engine.save(checkpoints.begin(1), asynchronous=True)
    _commit(rank, checkpoints, 1)
    curves = [jobs._steps(engine, 1)]
    has_trained = threading.Event()
    write = rank_checkpoint.write_part

    def write_half(path: Path, *arguments: Any) -> FileRecord:
        assert has_trained.wait(DEADLINE_S)
        record = write(path, *arguments)
        if rank == 1:
            os.truncate(path, record.nbytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    with mock.patch.object(rank_checkpoint, "write_part", write_half):
        engine.save(checkpoints.begin(2), asynchronous=True)
        curves.append(jobs._steps(engine, 1))
        if rank == 0:
            (run_dir / "curves.json").write_text(json.dumps(curves))
        dist.barrier()
        has_trained.set()
        _commit(rank, checkpoints, 2)


def _commit(rank: int, checkpoints: Checkpoints, step: int) -> None:
    """Commit as the controllers do: once every rank has written its part."""
    if rank == 0:
        Commit(checkpoints, step, {"step": step}, num_ranks=2, best=None).finish(deadline_s=DEADLINE_S)
    dist.barrier()


def resume(rank: int, model_dir: Path, half: Path, good: Path) -> dict[str, Any]:
    engine = jobs.build_engine(model_dir, TP2)
    with pytest.raises(CheckpointError, match=r"part-00001-of-00002.safetensors is damaged"):
        engine.load(half)
    engine.load(good)
    return jobs._steps(engine, 2)


def test_after_a_kill_in_the_middle_of_a_save_the_run_goes_on_from_the_checkpoint_before(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        ranks.run(2, train_until_killed, untied_folder, tmp_path)
    checkpoints = Checkpoints(root=tmp_path / "checkpoints", keep=2)
    (half,) = checkpoints.root.glob(".partial*")
    assert len(list(half.glob("part-*"))) >= 2, "nothing was being written"
    assert num_written(half) < 2

    good = find_checkpoint(tmp_path, "auto", pytest.fail)
    assert good is not None and checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        find_checkpoint(tmp_path, str(half), pytest.fail)
    resumed = ranks.run(2, resume, untied_folder, half, good)[0]
    curves = json.loads((tmp_path / "curves.json").read_text())
    for key in ("losses", "norms"):
        assert resumed[key] == [value for curve in curves for value in curve[key]]

    checkpoints.clear_partial()
    assert [path.name for path in checkpoints.root.iterdir()] == [good.name]
    for path in good.iterdir():
        for damage in (bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:], path.read_bytes()[:-1]):
            before = path.read_bytes()
            path.write_bytes(damage)
            with pytest.raises(CheckpointError, match=re.escape(f"{path} is damaged")):
                find_checkpoint(tmp_path, str(good), pytest.fail)
            path.write_bytes(before)
