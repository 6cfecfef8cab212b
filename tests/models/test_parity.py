"""Tests every family in every layout of `layouts.py` against transformers: values, gradients, and the exported bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import parity
from tests.models.layouts import LAYOUTS, QUICK, QWEN3_LAYOUTS, TIED_LAYOUTS, layouts_for, quick_first, quick_layouts
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import MODELS

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("family", "layout"),
    [case for family in MODELS for case in quick_first(layouts_for(family), quick_layouts(family), family)],
)
def test_every_layout_equals_transformers_and_exports_its_own_bits(
    family: str, layout: str, ranks: RankPool, reference_folder: Callable[..., Path]
) -> None:
    check(family, layout, ranks, reference_folder(family))


@pytest.mark.parametrize("layout", quick_first(TIED_LAYOUTS, ("tp2-pp2",)))
def test_a_tied_head_equals_transformers_too(
    layout: str, ranks: RankPool, reference_folder: Callable[..., Path]
) -> None:
    check("qwen2_5_vl", layout, ranks, reference_folder("qwen2_5_vl", is_head_tied=True), ", tied head")


@pytest.mark.parametrize("layout", quick_first(QWEN3_LAYOUTS, QUICK))
def test_internvl_with_a_qwen3_decoder_equals_transformers_too(
    layout: str, ranks: RankPool, reference_folder: Callable[..., Path]
) -> None:
    check(
        "internvl", layout, ranks, reference_folder("internvl_qwen3", is_head_tied=True), ", Qwen3 decoder, tied head"
    )


def check(family: str, layout: str, ranks: RankPool, folder: Path, variant: str = "") -> None:
    parallel = LAYOUTS[layout]
    seen = parity.Differences.worst(ranks.run(parallel.world_size, parity.compare, folder, parallel))
    parity.OBSERVED[family + variant, layout] = seen
    assert seen.num_scored >= sum(map(len, jobs.GROUPS)) // parallel.dp
    assert seen.logprob < TOLERANCE
    assert seen.entropy < TOLERANCE
    assert seen.gradient < TOLERANCE
    assert seen.num_changed_weights == 0
