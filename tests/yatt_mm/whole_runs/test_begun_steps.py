"""Tests that a run whose machine is lost in a step goes on with the responses that were there."""

from __future__ import annotations

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import kills
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import Kill

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]


def arguments(digits: Digits, name: str, *overrides: str) -> list[str]:
    return digits.arguments(
        name,
        "train.steps=4",
        "train.prompts_per_step=16",
        "train.num_minibatches=2",
        "eval.every=4",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "dataplane.memory=128MiB",
        *runs.judge(digits.model),
        *overrides,
    )


def test_a_run_that_is_lost_in_an_update_goes_on_with_the_responses_that_it_had(digits: Digits) -> None:
    """Test with a run that is lost whole, and that another number of controllers goes on with, on another node. Of the
    four steps the newest checkpoint has none, and three were begun."""
    whole = runs.run(arguments(digits, "not_lost"))
    assert whole.status == 0, whole.output
    dies = Kill(role="launcher", step=3, phase="train", after_s=0.0)
    at_phase = ("checkpoint.at=phase", "faults.max_restarts=0")
    lost, done = kills.run(arguments(digits, "lost", *at_phase), [dies])
    assert done == [dies] and lost.status == 1 and lost.left_behind == [], lost.output
    checkpoints = digits.run("lost") / "checkpoints"
    saved = sorted(path.name for path in checkpoints.iterdir() if path.name[0] != ".")
    assert saved == ["begun_000001", "begun_000002", "begun_000003", "step_000000"]
    came: list[str] = []
    more = (*at_phase, "controllers.num=1", "--resume")
    resumed, _ = kills.run(arguments(digits, "lost", *more), [], came=came)
    assert resumed.status == 0 and resumed.left_behind == [], resumed.output
    phases = {(int(step), phase) for step, phase, _ in (line.split() for line in came if line.count(" ") == 2)}
    assert {(3, "train"), (4, "rollout"), (4, "genrm")} <= phases
    again = {(step, phase) for step, phase in phases if step < 4 and phase in ("prompts", "rollout", "genrm")}
    assert not again, "what was there is neither sampled nor judged again"
    assert runs.curve(digits.folder, "lost") == runs.curve(digits.folder, "not_lost"), resumed.output
    assert [path.name for path in checkpoints.iterdir()] == ["step_000004"]
