"""Tests that a run does not go on in silence when nothing can be learnt from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = [pytest.mark.alone, pytest.mark.endings]


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


def test_steps_whose_gradient_is_not_finite_are_skipped_and_written_down_and_too_many_end_the_run(
    tmp_path: Path, tiny_dir: Path
) -> None:
    settings = ("train.steps=9", "algorithm.normalize_std=false", "faults.max_skipped_steps=1", "eval.every=0")
    done = run_with("return 3e38 * (-1) ** len(response)", tmp_path, tiny_dir, *settings)
    assert done.status == 1 and done.left_behind == [], done.output
    folder = (tmp_path / "runs" / "first").absolute()
    why = "because its loss or gradient was not finite"
    assert f"skipped: step 1, {why}; see {folder / 'skipped' / 'step_000001'}" in done.output
    assert f"error: 2 steps in a row were skipped, and faults.max_skipped_steps is 1; the last one {why}" in done.output
    (record,) = (record for record in runs.metrics(tmp_path, "first") if record["step"] == 1)
    assert record["train/num_skipped"] == 2 and "train/loss" not in record
    with np.load(folder / "skipped" / "step_000002" / "update-1-rank-0.npz") as update:
        tokens, advantages = update["0/0/token_ids"], update["0/0/advantages"]
        assert len(tokens) == len(update["0/0/loss_mask"]) and np.abs(advantages).max() > 1e38
        assert update[f"media/{update['0/0/media'][0]}"].dtype == np.uint8
        assert np.isfinite(update["0/0/logprobs"]).all()
    groups = (folder / "skipped" / "step_000002" / "groups-0.jsonl").read_text().splitlines()
    assert json.loads(groups[0])["prompt"] and max(map(abs, json.loads(groups[0])["rewards"])) == 3e38


def test_a_run_whose_rewards_are_all_equal_says_so_and_has_failed(tmp_path: Path, tiny_dir: Path) -> None:
    done = run_with("return 0.5", tmp_path, tiny_dir, "train.steps=3", "sampling.replace_groups=false")
    assert done.status == 1, done.output
    equal = "no group had two rewards that differ by more than algorithm.min_reward_range (0.001), and the mean was 0.5"
    assert f"no signal: in the last 3 steps {equal}; look at the rewards" in done.output
    assert f"error: nothing was learned: in 3 steps {equal}" in done.output
    assert done.left_behind == []
