"""The data plane's node is killed in the middle of a run: that costs time only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.killing_reward import VARIABLE

CURVE = ("eval/accuracy", "reward/mean", "train/loss", "train/entropy", "train/grad_norm", "rollout/num_tokens")
NUM_TRAIN, NUM_EVAL, NUM_STEPS = 24, 8, 3
PER_STEP = 8 * 4
"""Responses of a step: prompts times group size."""
DURING_GENERATION = NUM_EVAL + PER_STEP // 2
"""Of the first step: its rollouts are stored, half of them are scored."""
BEFORE_TRAINING = NUM_EVAL + 2 * PER_STEP
"""The last response of the second step: what the training ranks resolve next is on a dead node."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    runs.write_shard(path / "train-000000.tar", range(NUM_TRAIN))
    runs.write_shard(path / "eval-000000.tar", range(1000, 1000 + NUM_EVAL))
    return path


def curve(folder: Path, name: str) -> list[dict[str, float]]:
    return [{key: record[key] for key in CURVE if key in record} for record in runs.metrics(folder, name)]


@pytest.mark.timeout(1200)
def test_a_run_whose_node_is_killed_twice_gives_the_numbers_of_an_undisturbed_one(
    folder: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (f"train.steps={NUM_STEPS}", "eval.every=0", "checkpoint.every=0")
    undisturbed = runs.run(runs.arguments(folder, tiny_dir, "undisturbed", *small))
    assert undisturbed.status == 0, undisturbed.output
    monkeypatch.setenv(VARIABLE, f"{DURING_GENERATION},{BEFORE_TRAINING}")
    killing = "reward.function=tests.yatt_mm.killing_reward:even_length_after_a_kill"
    killed = runs.run(runs.arguments(folder, tiny_dir, "killed", *small, killing))
    assert killed.status == 0, killed.output
    assert killed.left_behind == []
    assert curve(folder, "killed") == curve(folder, "undisturbed")
    restarts = [record["dataplane/num_restarts"] for record in runs.metrics(folder, "killed")]
    assert restarts[0] == 0 and restarts[-1] == 2 and restarts == sorted(restarts)
    assert "ended with signal SIGKILL; it is started again" in killed.output
    assert all(record["dataplane/num_restarts"] == 0 for record in runs.metrics(folder, "undisturbed"))
