"""Tests of a whole run with a policy and a judge beside each other on two devices, which move between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

NUM_PROMPTS, GROUP_SIZE = 8, 4

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("colocation")
    runs.write_shard(path / "train-000000.tar", range(40), corrupt=(7,))
    runs.write_shard(path / "eval-000000.tar", range(1000, 1012))
    return path


@pytest.fixture(scope="module")
def partial(folder: Path, tiny_dir: Path) -> runs.Finished:
    """A run of two steps with a stream of prompts, more requests than needed, and a tail that is carried over.

    Responses are fast and verdicts are slow, so the devices move to the judge when all responses are there.
    """
    overrides = (
        "train.steps=2",
        "placement.mode=partial_colocation",
        "placement.decide_every_s=0.02",
        "rollout.deterministic=false",
        "rollout.max_tokens=1",
        "rollout.max_groups_per_engine=4",
        "sampling.over_dispatch=1.5",
        "sampling.tail=continue",
        "algorithm.name=ppo",
        "algorithm.kl.where=reward",
        "algorithm.kl.coef=0.5",
        "algorithm.kl.target=0.02",
        *runs.judge(tiny_dir),
        "reward.judges.tiny.max_groups_per_engine=1",
        "rollouts.keep=all",
    )
    return runs.run(runs.arguments(folder, tiny_dir, "partial", *overrides))


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "partial" / name).read_text().splitlines()]


def test_a_divided_run_ends_well_and_leaves_nothing_behind(partial: runs.Finished) -> None:
    assert partial.status == 0, partial.output
    assert partial.left_behind == []


def test_every_batch_is_full_and_every_trained_group_was_judged(partial: runs.Finished, folder: Path) -> None:
    assert partial.status == 0, partial.output
    for record in runs.metrics(folder, "partial")[1:]:
        assert record["sampling/num_groups"] == NUM_PROMPTS
        assert record["genrm/num_judged"] >= NUM_PROMPTS * GROUP_SIZE
        assert record["genrm/num_failed"] == 0
        assert record["sampling/num_prompts_used"] >= NUM_PROMPTS
        # Judges still have groups that no controller waits for any more, until the next phase begins.
        assert 0 < record["time/genrm_s"] < record["time/step_s"]
        assert record["placement/rollout_devices"] + record["placement/genrm_devices"] <= 2.0 + 1e-6
        if record["rollout/staleness_max"] == 0:
            assert record["rollout/logprob_diff_max"] < 1e-2


def test_what_the_judge_wrote_is_kept_with_its_scores(partial: runs.Finished, folder: Path) -> None:
    assert partial.status == 0, partial.output
    said = ""
    for record in runs.metrics(folder, "partial")[1:]:
        assert 0 < record["genrm/tiny_mean"] < 1
        rows = read_rows(table_path(folder / "runs" / "partial", record["step"]))
        trained = [row for row in rows if row["split"] == "train"]
        assert len({row["position"] for row in trained}) >= NUM_PROMPTS
        judged = [scored for row in trained for scored in row["scores"] if scored["source"] == "reward.judges.tiny"]
        assert [row["reward"] for row in trained] == [scored["score"] for scored in judged]
        said += "".join(scored["words"] or "" for scored in judged)
    assert said


def test_no_device_ever_has_two_awake_roles(partial: runs.Finished, folder: Path) -> None:
    assert partial.status == 0, partial.output
    events = json.loads((folder / "runs" / "partial" / "timeline.json").read_text())
    awake = [event for event in events if event.get("args", {}).get("state") == "awake"]
    assert {event["cat"] for event in awake} == {"rollout", "genrm", "train"}
    assert {event["pid"] for event in awake} == {0, 1}
    for i, event in enumerate(awake):
        for other in awake[i + 1 :]:
            if event["pid"] == other["pid"] and event["cat"] != other["cat"]:
                assert event["ts"] + event["dur"] <= other["ts"] or other["ts"] + other["dur"] <= event["ts"]


def test_every_division_is_logged_with_its_reason(partial: runs.Finished, folder: Path) -> None:
    assert partial.status == 0, partial.output
    decisions = read_lines(folder, "placement.jsonl")
    assert [d["step"] for d in decisions if d["moment"] == "step"] == [1, 2]
    num_moves = sum(record["placement/num_moves"] for record in runs.metrics(folder, "partial")[1:])
    assert num_moves and num_moves <= sum(d["moment"] == "generation" for d in decisions), "while prompts were answered"
    assert all(d["reason"] and set(d["split"]) <= set("012+") for d in decisions)


def test_the_distance_from_the_reference_is_measured_before_the_update(partial: runs.Finished, folder: Path) -> None:
    assert partial.status == 0, partial.output
    first, second = runs.metrics(folder, "partial")[1:]
    assert abs(first["train/kl"]) < 1e-4, "the engines have the reference's own weights"
    assert abs(second["train/kl"]) > 1e-4
    assert first["critic/loss"] > 0 and first["critic/explained_variance"] == 0.0, "all values begin at 0"
    assert second["critic/value_mean"] != 0
    assert (first["train/kl_coef"], second["train/kl_coef"]) == (0.5, pytest.approx(0.49))
