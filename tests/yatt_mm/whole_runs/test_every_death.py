"""Tests that kill an engine, a judge, a rank or a controller, once in every phase of a run with two ranks and a judge:
what was killed is made again, and the run trains on what a run without a fault trains on. What else may die:
`test_other_deaths.py`."""

from __future__ import annotations

import re
import signal

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths, kills
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import Kill

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
    of_role = overrides(digits, NUM_ENGINES[role])
    repair_seconds[role] = deaths.repairs(role, deaths.PHASES, digits, undisturbed, *of_role)


def test_a_rank_that_stands_still_is_found_by_what_it_finishes_and_made_again(undisturbed: str, digits: Digits) -> None:
    """Before the new ranks have loaded the checkpoint, a controller dies too."""
    stops = Kill(role="rank", step=3, phase="train", signal=signal.SIGSTOP)
    dies = Kill(role="controller", step=2, phase="resume", after_s=0.0)
    deadline = "controllers.deadline_s=25"
    finished, done = kills.run(deaths.arguments(digits, "still", *overrides(digits), deadline), [stops, dies])
    assert done == [stops, dies] and finished.status == 0, finished.output
    (fault, other) = kills.faults(digits.run("still"))
    assert (fault["role"], fault["phase"], fault["step"]) == ("train", "train", 3) and fault["seconds"] < 120
    when_it_was_stopped = r"did not finish (update of step 3 in 25 s|becoming awake in 12\.5 s)"
    assert re.search(when_it_was_stopped, fault["why"]), fault
    assert (other["role"], other["phase"], other["step"]) == ("controller", "resume", 2), other
    assert runs.curve(digits.folder, "still") == runs.curve(digits.folder, undisturbed)
    assert finished.left_behind == []
