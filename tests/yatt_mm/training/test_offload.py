"""Tests of releasing memory between updates and taking it back: the same bits, nothing left behind, one host copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.freeze import Part
from models.layout.parallel import Parallel
from tests.models.layouts import quick_first
from tests.yatt_mm.training import host_state, jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.training.offload import Holding

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}


CASES: dict[str, tuple[Parallel, str, tuple[Part, ...]]] = {
    f"{layout}-{dtype}-{trained}": (parallel, dtype, frozen)
    for layout, parallel in (("tp2", Parallel(tp=2)), ("dp2", Parallel(dp=2)))
    for dtype in ("float32", "bfloat16")
    for trained, frozen in (("all", ()), ("frozen tower", ("tower",)))
}
QUICK = ("tp2-bfloat16-all", "dp2-float32-frozen tower")
"""The cases of `make test`; the others are for `make parity`."""


@pytest.mark.parametrize("case", quick_first(CASES, QUICK))
def test_updates_with_everything_released_in_between_have_the_same_bits(
    case: str, ranks: RankPool, untied_folder: Path
) -> None:
    parallel, dtype, frozen = CASES[case]
    settings = SETTINGS | {"dtype": dtype, "freeze": frozen}
    wanted = ranks.run(2, jobs.train, untied_folder, parallel, 3, settings)
    for plain, moved in zip(wanted, ranks.run(2, jobs.train_with_releases, untied_folder, parallel, 3, settings)):
        assert moved["losses"] == plain["losses"]
        assert moved["norms"] == plain["norms"]
        assert all(np.array_equal(moved["weights"][name], plain["weights"][name]) for name in plain["weights"])
        assert moved["left"] == [0, 0, 0]
        held = moved["at_end"]
        assert moved["host_bytes"] == [held[Holding.WEIGHTS] + held[Holding.OPTIMIZER]] * 3
        # moments of this rank's share, and where the model is not float32 itself, its main weights
        per_value = 8 if dtype == "float32" else 12
        whole = per_value * held[Holding.GRADIENTS] / 4 / parallel.dp
        assert 0.95 * whole < held[Holding.OPTIMIZER] <= whole  # the buffer of gradients is padded


def test_a_released_engine_names_the_work_that_it_refuses_and_what_is_missing(
    ranks: RankPool, untied_folder: Path
) -> None:
    moved = ranks.run(1, jobs.train_with_releases, untied_folder, Parallel(), 1, SETTINGS)[0]
    assert moved["refusals"] == [
        "cannot update: released weights, gradients, optimizer; hold them again before it",
        "cannot export: released weights; hold them again before it",
        "cannot save a checkpoint: released weights, optimizer; hold them again before it",
    ]


def test_optimizer_state_on_the_host_is_refused_where_there_is_no_gpu(ranks: RankPool, untied_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(AssertionError, match=r"train\.optimizer_offload_fraction is 0\.5, but there is no GPU"):
        ranks.run(1, jobs.train, untied_folder, Parallel(), 1, {"offload_frac": 0.5})


@pytest.mark.parametrize("fraction", [0.5, pytest.param(1.0, marks=pytest.mark.parity)])
def test_a_checkpoint_with_optimizer_state_on_the_host_continues_with_the_same_bits(
    fraction: float, ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    plain = ranks.run(1, jobs.train_and_save, untied_folder, Parallel(), tmp_path / "plain", "bfloat16")[0]
    saved, loaded, shares = ranks.run(1, host_state.train_and_continue, untied_folder, tmp_path / "host", fraction)[0]
    assert shares and fraction <= min(shares) <= max(shares) < fraction + 0.1, "whole parameters stay on the host"
    for found in (saved, loaded):
        assert found["losses"] == plain["losses"]
        assert all(np.array_equal(found["weights"][name], plain["weights"][name]) for name in plain["weights"])


def test_optimizer_state_on_the_host_needs_main_weights(ranks: RankPool, untied_folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"model\.dtype is float32, .* set model\.dtype to bfloat16"):
        ranks.run(1, host_state.train_in_float32, untied_folder)
