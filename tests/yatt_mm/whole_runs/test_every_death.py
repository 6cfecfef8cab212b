"""Tests that kill an engine, a judge, a rank or a controller, once in every phase of a run with two ranks and a judge:
what was killed is made again, and the run trains on what a run without a fault trains on. What else may die:
`test_other_deaths.py`."""

from __future__ import annotations

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

NUM_ENGINES = {"rollout actor": 2, "engine core": 2, "judge": 1, "rank": 1, "controller": 1}
"""[role] the engines of its run: an engine that dies leaves another one. The bits are the same."""
ROLES = tuple(NUM_ENGINES)


def overrides(digits: Digits, num_engines: int = 1) -> tuple[str, ...]:
    return (*runs.judge(digits.model), f"rollout.num_engines={num_engines}")


@pytest.fixture(scope="module")
def undisturbed(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> str:
    return deaths.undisturbed(tmp_path_factory, digits, "undisturbed", *overrides(digits))


@pytest.mark.parametrize("role", ROLES)
def test_a_run_survives_the_death_of(
    role: str, undisturbed: str, digits: Digits, repair_seconds: dict[str, dict[str, float]]
) -> None:
    name, of_role = f"without_{role.replace(' ', '_')}", overrides(digits, NUM_ENGINES[role])
    repair_seconds |= deaths.repairs(name, deaths.kills_of(role), digits, undisturbed, *of_role)
