"""Tests that a run does not go on in silence when nothing can be learnt from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm import runs

pytestmark = pytest.mark.alone


def test_a_reward_function_that_always_raises_ends_the_run_with_its_traceback(tmp_path: Path, tiny_dir: Path) -> None:
    runs.write_shard(tmp_path / "train-000000.tar", range(40))
    runs.write_shard(tmp_path / "eval-000000.tar", range(1000, 1012))
    mine = tmp_path / "mine.py"
    mine.write_text("def score(response, answer, fields):\n    return fields['no_such_field']\n")
    small = ("placement.num_devices=1", "rollout.num_engines=1", "train.steps=2")
    done = runs.run(runs.arguments(tmp_path, tiny_dir, "raising", *small, f"reward.function={mine}:score"))
    assert done.status == 1, done.output
    counts = "on 12 of the 12 responses of the evaluation at step 0"
    assert f"reward.function {mine}:score failed {counts}, which score 0." in done.output
    assert f'File "{mine}", line 2, in score\n' in done.output
    (said,) = (line for line in done.output.splitlines() if line.startswith("error: "))
    assert "failed on 12 of the 12 responses" in said and f"KeyError: 'no_such_field' ({mine}:2)" in said
    (where,) = (line for line in done.output.splitlines() if line.startswith("logs: "))
    logs = [Path(log) for log in where.removeprefix("logs: ").split(", ")]
    assert logs[-1].name == "launcher.log"
    assert "RewardError" in logs[-1].read_text()
    assert done.left_behind == []


@pytest.mark.faults
def test_a_run_whose_rewards_are_all_equal_says_so_and_has_failed(tmp_path: Path, tiny_dir: Path) -> None:
    runs.write_shard(tmp_path / "train-000000.tar", range(40))
    runs.write_shard(tmp_path / "eval-000000.tar", range(1000, 1012))
    mine = tmp_path / "mine.py"
    mine.write_text("def score(response, answer, fields):\n    return 0.5\n")
    small = ("placement.num_devices=1", "rollout.num_engines=1", "train.steps=3", "sampling.replace_groups=false")
    done = runs.run(runs.arguments(tmp_path, tiny_dir, "equal", *small, f"reward.function={mine}:score"))
    assert done.status == 1, done.output
    equal = "no group had two different rewards (mean 0.500)"
    assert f"no signal in the last 3 steps {equal}; look at the rewards" in done.output
    assert f"error: nothing was learned: in 3 steps {equal}" in done.output
    assert done.left_behind == []
