"""Tests of the place from which a run goes on after a fault. The real repairs are in the whole runs that are killed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.yatt_mm import runs
from yatt_mm.batching.journal import Journal
from yatt_mm.batching.packed import Packed
from yatt_mm.batching.rendezvous import Progress
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import RunLost, WorkerError
from yatt_mm.config.run_config import load_config
from yatt_mm.protocol.control import RunStart
from yatt_mm.runtime import repairs
from yatt_mm.runtime.losses import Settled
from yatt_mm.runtime.repairs import Repairs

ERROR = WorkerError("controller 0 was lost")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repairs:
    """The repairs of a run that began anew, has a checkpoint of step 10, and has finished step 12."""
    path, *rest = runs.arguments(tmp_path, tmp_path, "repaired")
    config = load_config(runs.ROOT / path, rest)
    checkpoints = Checkpoints.of_run(config.run_dir)
    checkpoints.begin(10)
    checkpoints.commit(10, {"step": 10})
    journal = Journal(num_controllers=1, max_bytes=1)
    for step in range(8, 13):
        journal.put(step, 0, Packed.of(None), 0)  # type: ignore[arg-type]
    journal.drop_until(10)
    monkeypatch.setattr(repairs, "wait_all", lambda calls, **_: [reply for _, reply in calls])
    crew: Any = SimpleNamespace(rendezvous=SimpleNamespace(covers=SimpleNamespace(remote=journal.covers)))
    start = RunStart(step=0, checkpoint=None, train_sets=(), eval_sets=())
    return Repairs(crew, config, start, pytest.fail)


def where(made: Repairs, *, step: int, ranks_at: int | None) -> tuple[int, str | None, int]:
    progress = Progress(step=step, at_step=step + 1, phase="train", best=None, kl_coef=None)
    found = made._where_to_go_on(ERROR, progress, Settled(lost={}, ranks_at=ranks_at, silent=frozenset()))
    return found.step, found.checkpoint and Path(found.checkpoint).name, found.ranks_at


@pytest.mark.parametrize("ranks_at", [10, 11, 12, 13])
def test_ranks_with_the_weights_of_a_step_that_the_journal_knows_keep_them(made: Repairs, ranks_at: int) -> None:
    assert where(made, step=12, ranks_at=ranks_at) == (12, None, ranks_at)


@pytest.mark.parametrize("ranks_at", [0, None])
def test_ranks_that_are_lost_and_new_ones_that_had_not_loaded_the_checkpoint_yet_load_it(
    made: Repairs, ranks_at: int | None
) -> None:
    assert where(made, step=12, ranks_at=ranks_at) == (12, "step_000010", 10)


def test_a_run_of_which_records_were_dropped_starts_again(made: Repairs) -> None:
    with pytest.raises(RunLost, match="the records since step 10 are too large"):
        where(made, step=14, ranks_at=None)
