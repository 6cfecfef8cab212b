"""Every family in every layout of `layouts.py` against transformers: values, gradients, exported bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.parallel import Parallel
from tests.models import parity
from tests.models.layouts import LAYOUTS, TIED_LAYOUTS
from tests.training.ranks import RankPool

TOLERANCE = 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_transformers_and_exports_its_own_bits(
    layout: str, ranks: RankPool, reference_folder: Path
) -> None:
    check("Qwen2.5-VL", layout, LAYOUTS[layout], ranks, reference_folder)


@pytest.mark.parametrize("layout", TIED_LAYOUTS)
def test_a_tied_head_equals_transformers_too(layout: str, ranks: RankPool, tied_reference_folder: Path) -> None:
    check("Qwen2.5-VL, tied head", layout, LAYOUTS[layout], ranks, tied_reference_folder)


def check(model: str, layout: str, parallel: Parallel, ranks: RankPool, folder: Path) -> None:
    seen = parity.Differences.worst(ranks.run(parallel.world_size, parity.compare, folder, parallel))
    parity.OBSERVED[model, layout] = seen
    assert seen.logprob < TOLERANCE
    assert seen.entropy < TOLERANCE
    assert seen.gradient < TOLERANCE
    assert seen.num_changed_weights == 0
