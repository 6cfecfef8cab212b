"""Training curves: the same losses and gradient norms however the work is divided, recomputed or partly frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.freeze import PARTS, Part, part_of
from models.parallel import Parallel
from tests.training import jobs
from tests.training.ranks import RankPool

SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
NUM_STEPS = 5

CASES: dict[str, tuple[Parallel, dict[str, Any]]] = {
    "recompute-full": (Parallel(), {"recompute": "full"}),
    "recompute-selective": (Parallel(tp=2, sp=True), {"recompute": "selective"}),
    "pp2-uneven": (Parallel(pp=2, first_stage_layers=1), {}),
    "pp2-vpp2": (Parallel(pp=2, vpp=2), {}),
    "pp2-vpp2-recompute": (Parallel(pp=2, vpp=2), {"recompute": "full"}),
}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, deep_folder: Path) -> dict[str, Any]:
    """The curve of one rank."""
    return ranks.run(1, jobs.train, deep_folder, Parallel(), NUM_STEPS, SETTINGS)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_curve_does_not_depend_on_stages_nor_on_recomputation(
    name: str, ranks: RankPool, deep_folder: Path, alone: dict[str, Any]
) -> None:
    parallel, settings = CASES[name]
    for result in ranks.run(parallel.world_size, jobs.train, deep_folder, parallel, NUM_STEPS, SETTINGS | settings):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)


@pytest.mark.parametrize("parts", [("tower",), ("tower", "merger"), ("language",)])
def test_frozen_parts_stay_as_they_are_and_cost_no_optimizer_state(
    parts: tuple[Part, ...], ranks: RankPool, deep_folder: Path
) -> None:
    single = ranks.run(1, jobs.frozen_parts, deep_folder, Parallel(), parts)[0]
    for name, tensor in single["before"].items():
        part = part_of(name.replace("visual.", "vision_model.visual.") if "visual." in name else name)
        assert np.array_equal(tensor, single["after"][name]) == (part in parts), name
    assert single["num_states"] < single["num_trained"] + 1024  # padding
    for parallel in (Parallel(tp=2, pp=2), Parallel(pp=2, vpp=2)):
        for result in ranks.run(parallel.world_size, jobs.frozen_parts, deep_folder, parallel, parts):
            assert result["losses"] == pytest.approx(single["losses"], rel=1e-5)
            assert result["norms"] == pytest.approx(single["norms"], rel=1e-5)


def test_freezing_everything_is_refused(ranks: RankPool, deep_folder: Path) -> None:
    with pytest.raises(AssertionError, match="all of the model; leave one of them out"):
        ranks.run(1, jobs.frozen_parts, deep_folder, Parallel(), PARTS)
