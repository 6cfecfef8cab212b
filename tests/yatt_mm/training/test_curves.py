"""Tests of training curves: the same losses and gradient norms however the work is divided, recomputed or partly
frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.freeze import PARTS, Part, part_of
from models.layout.parallel import Parallel
from tests.models.layouts import LAYOUTS, layouts_for, quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool

SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
NUM_STEPS = 5

PIPELINES = {
    "pp2-uneven": Parallel(pp=2, first_stage_layers=1),
    "pp2-vpp2": Parallel(pp=2, vpp=2),
    "tp2-dp2": Parallel(tp=2, dp=2),
    "cp2-dp2": Parallel(cp=2, dp=2, cp_order="zigzag"),
    "pp2-vpp2-cp2": Parallel(pp=2, vpp=2, cp=2),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"freeze": ("tower",)},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "overlap": {"overlap_grad_reduce": True},
}
EVERY_VARIANT = ("tp1", "dp2", "tp2-cp2-sp", "pp2-vpp2")
"""The layouts that run in all variants. The others run with all parts trained, and with frozen parts."""

CASES: dict[str, tuple[Parallel, dict[str, Any]]] = {
    f"{layout} {variant}": (parallel, SETTINGS | settings)
    for layout, parallel in ({name: LAYOUTS[name] for name in layouts_for("qwen2_5_vl")} | PIPELINES).items()
    for variant, settings in VARIANTS.items()
    if layout in EVERY_VARIANT or variant in ("trained", "frozen")
}
DIVIDED = sorted(
    (case for case, (layout, _) in CASES.items() if layout.world_size > 1), key=lambda case: CASES[case][0].world_size
)
QUICK = {
    "dp2 full",
    "dp2 overlap",
    "pp2-uneven frozen",
    "pp2-vpp2-cp2 trained",
}
"""The cases of `make test`; the others are for `make parity`."""


@pytest.fixture(scope="module")
def alone(ranks: RankPool, deep_folder: Path) -> dict[str, dict[str, list[float]]]:
    """The metrics of each training step, computed by one rank alone."""
    cases = {case: given for case, given in CASES.items() if given[0].world_size == 1}
    return ranks.run(1, jobs.curves, deep_folder, cases, NUM_STEPS)[0]


def test_one_rank_has_the_same_curve_with_recomputation_and_another_with_a_frozen_tower(
    alone: dict[str, dict[str, list[float]]],
) -> None:
    for variant in ("full", "selective", "overlap"):
        check_same(alone[f"tp1 {variant}"], alone["tp1 trained"], variant)
    frozen = alone["tp1 frozen"]
    assert frozen["losses"][0] == alone["tp1 trained"]["losses"][0]
    assert frozen["losses"][-1] != pytest.approx(alone["tp1 trained"]["losses"][-1], rel=1e-4)


@pytest.mark.parametrize("case", quick_first(DIVIDED, QUICK))
def test_curves_do_not_depend_on_the_layout(
    case: str, ranks: RankPool, deep_folder: Path, alone: dict[str, dict[str, list[float]]]
) -> None:
    # two of the four microbatches, the last one included, have no image: a replica of dp2 sees none at all.
    # the norm covers every shard once: weights without their tensor-parallel mark would count in part
    for result in ranks.run(CASES[case][0].world_size, jobs.curves, deep_folder, {case: CASES[case]}, NUM_STEPS):
        check_same(result[case], alone["tp1 frozen" if case.endswith("frozen") else "tp1 trained"], case)


def check_same(
    found: dict[str, list[float]], wanted: dict[str, list[float]], case: str, *, norms_rel: float = 1e-5
) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5), case
    assert found["norms"] == pytest.approx(wanted["norms"], rel=norms_rel), case


@pytest.mark.parametrize(
    "parts",
    [
        ("tower", "merger"),
        pytest.param(("tower",), marks=pytest.mark.parity),
        pytest.param(("language",), marks=pytest.mark.parity),
    ],
)
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
            # the later norm follows an Adam update, which divides by small numbers: seen once at 1.07e-5
            check_same(result, single, str(parallel), norms_rel=2e-5)


def test_freezing_everything_is_refused(ranks: RankPool, deep_folder: Path) -> None:
    with pytest.raises(AssertionError, match="all of the model; leave one of them out"):
        ranks.run(1, jobs.frozen_parts, deep_folder, Parallel(), PARTS)
