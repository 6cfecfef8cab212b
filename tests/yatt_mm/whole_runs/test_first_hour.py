"""Tests that a run does not go on in silence when nothing can be learnt from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = pytest.mark.alone


def run_with(reward: str, folder: Path, model: Path, *overrides: str) -> runs.Finished:
    """Run on one device, with a reward function in the file `mine.py` that consists of this line."""
    runs.write_shard(folder / "train-000000.tar", range(40))
    runs.write_shard(folder / "eval-000000.tar", range(1000, 1012))
    mine = folder / "mine.py"
    mine.write_text(f"def score(response, answer, fields):\n    {reward}\n")
    small = ("placement.num_devices=1", "rollout.num_engines=1", f"reward.function={mine}:score")
    return runs.run(runs.arguments(folder, model, "first", *small, *overrides))


def test_a_reward_function_that_always_raises_ends_the_run_with_its_traceback(tmp_path: Path, tiny_dir: Path) -> None:
    done = run_with("return fields['no_such_field']", tmp_path, tiny_dir, "train.steps=2")
    mine = tmp_path / "mine.py"
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
    assert len(read_rows(table_path(tmp_path / "runs" / "first", 0))) == 4, "the responses can be read all the same"
    assert done.left_behind == []


@pytest.mark.faults
def test_a_run_whose_rewards_are_all_equal_says_so_and_has_failed(tmp_path: Path, tiny_dir: Path) -> None:
    done = run_with("return 0.5", tmp_path, tiny_dir, "train.steps=3", "sampling.replace_groups=false")
    assert done.status == 1, done.output
    equal = "no group had two rewards that differ by more than algorithm.min_reward_range (0.001), and the mean was 0.5"
    assert f"no signal: in the last 3 steps {equal}; look at the rewards" in done.output
    assert f"error: nothing was learned: in 3 steps {equal}" in done.output
    assert done.left_behind == []
