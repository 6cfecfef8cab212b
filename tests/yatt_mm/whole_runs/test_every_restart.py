"""Tests that kill what a run cannot go on without, once in every phase: everything is started again from the newest
checkpoint, and the run trains on what a run without a fault trains on. It has one device with an engine, a judge and a
rank, because their starts take most of the time."""

from __future__ import annotations

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def undisturbed(digits: Digits) -> str:
    finished = runs.run(deaths.arguments(digits, "undisturbed_small", *deaths.SMALL))
    assert finished.status == 0, finished.output
    return "undisturbed_small"


@pytest.mark.parametrize("role", deaths.ENDS_ALL)
def test_a_run_starts_again_after_the_death_of(
    role: str, undisturbed: str, digits: Digits, repair_seconds: dict[str, dict[str, float]]
) -> None:
    repair_seconds[role] = deaths.repairs(role, deaths.PHASES, digits, undisturbed, *deaths.SMALL)
