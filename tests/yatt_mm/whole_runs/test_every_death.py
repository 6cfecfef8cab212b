"""Tests that kill one kind of process after the other, once in every phase of a run with two engines, two ranks and a
judge: what was killed is made again, and the run trains on what a run without a fault trains on."""

from __future__ import annotations

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import PATTERNS

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

ROLES = [role for role in PATTERNS if role not in ("node", *deaths.ENDS_ALL)]
# a node that dies six times in a minute is given up, so it has a run for each half of the phases
RUNS = [("node", deaths.PHASES[:4]), ("node", deaths.PHASES[4:]), *((role, deaths.PHASES) for role in ROLES)]


@pytest.fixture(scope="module")
def undisturbed(digits: Digits) -> str:
    finished = runs.run(deaths.arguments(digits, "undisturbed", *runs.judge(digits.model)))
    assert finished.status == 0, finished.output
    return "undisturbed"


@pytest.mark.parametrize(("role", "phases"), RUNS, ids=lambda value: value if isinstance(value, str) else value[0][1])
def test_a_run_survives_the_death_of(
    role: str,
    phases: tuple[tuple[int, str], ...],
    undisturbed: str,
    digits: Digits,
    repair_seconds: dict[str, dict[str, float]],
) -> None:
    found = deaths.repairs(role, phases, digits, undisturbed, *runs.judge(digits.model))
    if found:
        repair_seconds.setdefault(role, {}).update(found)
