"""Tests that kill an engine, a judge, a rank or a controller, once in every phase of a run with two engines, two ranks
and a judge: what was killed is made again, and the run trains on what a run without a fault trains on. What else may
die: `test_deaths_on_one_device.py`."""

from __future__ import annotations

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

ROLES = ("rollout actor", "engine core", "judge", "rank", "controller")


@pytest.fixture(scope="module")
def undisturbed(digits: Digits) -> str:
    finished = runs.run(deaths.arguments(digits, "undisturbed", *runs.judge(digits.model)))
    assert finished.status == 0, finished.output
    return "undisturbed"


@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_the_death_of(
    role: str, undisturbed: str, digits: Digits, repair_seconds: dict[str, dict[str, float]]
) -> None:
    repair_seconds[role] = deaths.repairs(role, deaths.PHASES, digits, undisturbed, *runs.judge(digits.model))
